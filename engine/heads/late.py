"""Tokens of steps of which a head that keeps KV has put nothing into the pool yet.

A step that decodes gives the head a token of each row, and for so few it takes nearly as long as for fifty: what it has
to read, and to call, is the same. So they wait until they are enough, or until somebody wants to know: who is about to
draft, to ship, to copy, to store a block, or to write to one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.batch.batch import Batch
from engine.batch.rows import Ints
from engine.heads.features import UNKNOWN, slots_before
from engine.model.taps import Taps

# N tokens, S slots of the pool, W numbers that are known of each

_MOST = 64  # tokens that wait


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Tokens that a model's steps have computed."""

    token_ids_N: Tensor  # on the device
    positions_N: Ints
    slots_N: Ints  # of their KV
    before_N: Ints  # slot of the position before each; UNKNOWN where there is none
    hidden_NW: Tensor  # the model's hidden states that are wanted of them, side by side

    @classmethod
    def of(cls, batch: Batch, taps: Taps, layers: tuple[int, ...], *, block_size: int) -> Entries:
        """Good until the next step."""
        assert taps.token_ids_T is not None
        return cls(
            token_ids_N=taps.token_ids_T[: batch.num_tokens],
            positions_N=batch.positions,
            slots_N=batch.slots,
            before_N=slots_before(batch, block_size=block_size),
            hidden_NW=torch.cat([taps[layer] for layer in layers], dim=-1),
        )


class LateEntries:
    """Owned by the step thread."""

    def __init__(self, num_slots: int) -> None:
        self._waiting: list[Entries] = []
        self._num_waiting = 0
        self._is_late_S = np.zeros(num_slots, dtype=bool)
        self._place_of_S = np.full(num_slots + 1, UNKNOWN)  # one more, which UNKNOWN finds; between calls all UNKNOWN

    @property
    def are_enough(self) -> bool:
        return self._num_waiting >= _MOST

    def add(self, entries: Entries) -> None:
        """Of another step."""
        kept = replace(
            entries,
            token_ids_N=entries.token_ids_N.clone(),
            positions_N=entries.positions_N.copy(),
            slots_N=entries.slots_N.copy(),
        )
        self._waiting.append(kept)
        self._num_waiting += len(kept.slots_N)
        self._is_late_S[kept.slots_N] = True

    def has(self, slots_N: Ints) -> Ints:
        """(N,) bool: of which of these slots something waits."""
        found: Ints = self._is_late_S[slots_N]
        return found

    def take(self) -> Entries | None:
        """All that wait, of each slot the last: those before it were drafts that turned out wrong."""
        waiting, self._waiting, self._num_waiting = self._waiting, [], 0
        if not waiting:
            return None
        slots_N = np.concatenate([one.slots_N for one in waiting])
        self._is_late_S[slots_N] = False
        is_last_N = self.places(slots_N, slots_N) == np.arange(len(slots_N))
        last = torch.from_numpy(is_last_N)
        return Entries(
            token_ids_N=torch.cat([one.token_ids_N for one in waiting])[last],
            positions_N=np.concatenate([one.positions_N for one in waiting])[is_last_N],
            slots_N=slots_N[is_last_N],
            before_N=np.concatenate([one.before_N for one in waiting])[is_last_N],
            hidden_NW=torch.cat([one.hidden_NW for one in waiting])[last],
        )

    def places(self, slots_N: Ints, wanted: Ints) -> Ints:
        """Where in slots_N each of the wanted ones is for the last time; UNKNOWN where it is not."""
        self._place_of_S[slots_N] = np.arange(len(slots_N))
        found: Ints = self._place_of_S[wanted]
        self._place_of_S[slots_N] = UNKNOWN
        return found
