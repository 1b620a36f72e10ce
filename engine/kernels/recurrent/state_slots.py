"""States of recurrent layers, and the slots that a step reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# S sequences and T tokens of the step, N slots, L inputs kept, C channels, H heads, K key features, V value features

# Maximum tokens of a sequence for which the recurrence advances token by token; longer runs are computed in chunks.
MAX_RUN = 16


class LayerStates(NamedTuple):
    """States of one layer in all slots, each of them dense."""

    # In the activations' dtype.
    conv_NLC: Tensor
    # fp32; empty for layers with a convolution only.
    matrix_NHKV: Tensor


@dataclass(frozen=True)
class StateSlots:
    """Packed sequences of a step, and the indices of their state slots.

    All tensors are int64, on the states' device. A step writes each slot once at most, and reads no slot that another
    sequence writes. A sequence may write the slot that it reads. To roll back a draft, a caller has the states after
    its tokens written to different slots, and keeps one of them.
    """

    # First token of each sequence, and T: (S + 1).
    query_starts_S1: Tensor
    # Slot of the state before the sequence's first token; -1: zeros.
    read_S: Tensor
    # Slot for the state after the token; -1: not written.
    write_T: Tensor
    # Tokens of the longest sequence, or a higher number.
    max_query_len: int

    @classmethod
    def of(
        cls,
        query_lens: Sequence[int],
        read: Sequence[int],
        write: Sequence[Sequence[int]],
        device: torch.device | None = None,
    ) -> StateSlots:
        """Build from lists. write: for each sequence, slots for the states after its last tokens."""
        starts = [0]
        slots: list[int] = []
        for query_len, kept in zip(query_lens, write, strict=True):
            starts.append(starts[-1] + query_len)
            slots += [-1] * (query_len - len(kept)) + list(kept)
        starts_S1, read_S, write_T = (
            torch.tensor(part, dtype=torch.int64, device=device) for part in (starts, read, slots)
        )
        return cls(starts_S1, read_S, write_T, max(query_lens, default=0))
