"""A sequence that heads are asked about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

# R rows, V vocabulary, D tokens that a head knows


class HeadRow(NamedTuple):
    """One whose next tokens are to be guessed."""

    token_id: int  # its last
    position: int  # of that
    blocks: Sequence[int]  # its table, which has a place for the last token


class HeadLogits(NamedTuple):
    """Of the next tokens of some rows."""

    values_RD: Tensor  # fp32; may be overwritten
    ids_D: Tensor | None = None  # of the tokens that they are of, on the same device; None: all, in order


# From the logits of the next token of some rows to these tokens: which rows they are, and how many tokens of the draft
# are before.
Choose = Callable[[HeadLogits, Sequence[int], int], Sequence[int]]
