"""A sequence that heads are asked about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

# R rows, V vocabulary


class HeadRow(NamedTuple):
    """One whose next tokens are to be guessed."""

    token_id: int  # its last
    position: int  # of that
    blocks: Sequence[int]  # its table, which has a place for the last token


# From the logits (R, V) fp32 of the next token of some rows to these tokens: which rows they are, and how many tokens
# of the draft are before. The logits may be overwritten.
Choose = Callable[[Tensor, Sequence[int], int], Sequence[int]]
