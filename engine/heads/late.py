"""Tokens of steps of which a head that keeps KV has put nothing into the pool yet.

A step that decodes gives the head a token of each row, and for so few it takes nearly as long as for fifty: what it has
to read, and to call, is the same. So they wait until they are enough, or until somebody wants to know: who is about to
draft, to ship, to copy, to store a block, or to write to one.
"""

from __future__ import annotations

from dataclasses import dataclass

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
            hidden_NW=side_by_side(taps, layers),
        )


class LateEntries:
    """Owned by the step thread. To add a step is done in each, with caches that are cold by then: so numbers are kept
    as they are in Python, and hardly anything of numpy or torch is called."""

    def __init__(self, num_slots: int, *, block_size: int) -> None:
        self._size = block_size
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._slots: list[int] = []
        self._before: list[int] = []
        self._hidden: list[Tensor] = []  # of each step (N, W)
        self._are_late: set[int] = set()  # slots
        self._place_of_S = np.full(num_slots + 1, UNKNOWN)  # one more, which UNKNOWN finds; between calls all UNKNOWN

    @property
    def are_enough(self) -> bool:
        return len(self._slots) >= _MOST

    def add(self, batch: Batch, hidden_NW: Tensor) -> None:
        """All tokens of another step, which the host knows. hidden_NW: ours."""
        positions, slots = batch.positions.tolist(), batch.slots.tolist()
        if any(position % self._size == 0 for position in positions):
            self._before += slots_before(batch, block_size=self._size).tolist()
        else:  # mostly
            self._before += [slot - 1 for slot in slots]
        self._token_ids += batch.token_ids.tolist()
        self._positions += positions
        self._slots += slots
        self._hidden.append(hidden_NW)
        self._are_late.update(slots)

    def has(self, slot: int) -> bool:
        """Whether something waits of it."""
        return slot in self._are_late

    def take(self) -> Entries | None:
        """All that wait, of each slot the last: those before it were drafts that turned out wrong."""
        if not self._slots:
            return None
        slots_N = np.array(self._slots)
        is_last_N = self.places(slots_N, slots_N) == np.arange(len(slots_N))
        last = torch.from_numpy(is_last_N)
        entries = Entries(
            token_ids_N=torch.tensor(self._token_ids, dtype=torch.int32)[last],
            positions_N=np.array(self._positions)[is_last_N],
            slots_N=slots_N[is_last_N],
            before_N=np.array(self._before)[is_last_N],
            hidden_NW=torch.cat(self._hidden)[last],
        )
        for waiting in (self._token_ids, self._positions, self._slots, self._before, self._hidden, self._are_late):
            waiting.clear()
        return entries

    def places(self, slots_N: Ints, wanted: Ints) -> Ints:
        """Where in slots_N each of the wanted ones is for the last time; UNKNOWN where it is not."""
        self._place_of_S[slots_N] = np.arange(len(slots_N))
        found: Ints = self._place_of_S[wanted]
        self._place_of_S[slots_N] = UNKNOWN
        return found


def side_by_side(taps: Taps, layers: tuple[int, ...]) -> Tensor:
    """(N, W): a copy."""
    return torch.cat([taps[layer] for layer in layers], dim=-1)
