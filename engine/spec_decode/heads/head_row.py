"""Inputs and outputs of draft heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

# R rows, V vocabulary, D draft vocabulary


class HeadRow(NamedTuple):
    """Sequence to draft for."""

    token_id: int  # last token
    position: int  # of the last token
    blocks: Sequence[int]  # block table, with room for the last token


class HeadLogits(NamedTuple):
    """Logits of the next tokens of some rows."""

    values_RD: Tensor  # fp32; may be overwritten
    ids_D: Tensor | None = None  # token ids of the columns, on the same device; None: the full vocabulary


# Chooses the next tokens from the logits of some rows. Arguments: logits, row numbers, number of draft tokens before.
Choose = Callable[[HeadLogits, Sequence[int], int], Sequence[int]]
