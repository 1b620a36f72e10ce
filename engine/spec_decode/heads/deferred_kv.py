"""Deferred draft KV: tokens of steps whose draft-layer KV is not in the pool yet.

A decode step gives the layer one token per row, and computing so few takes nearly as long as computing fifty. So tokens
are collected until there are enough, or until the KV is needed: to draft, ship, copy, store, or overwrite a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.batch.batch import Batch
from engine.batch.rows import Ints
from engine.model.aux_hidden_states import AuxHiddenStates
from engine.spec_decode.heads.features import UNKNOWN, list_before, slots_before

# N tokens, S slots of the pool, W width of the hidden states of a token


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Tokens that steps of the model have computed."""

    token_ids_N: Tensor  # on the device
    positions_N: Ints
    slots_N: Ints  # KV slot of each token
    before_N: Ints  # slot of the position before each token's; UNKNOWN if there is none
    hidden_NW: Tensor  # the model's auxiliary hidden states, side by side

    @classmethod
    def of(
        cls, batch: Batch, aux_hidden_states: AuxHiddenStates, layers: tuple[int, ...], *, block_size: int
    ) -> Entries:
        """Return the tokens of a step, valid until the next step."""
        assert aux_hidden_states.token_ids_T is not None
        return cls(
            token_ids_N=aux_hidden_states.token_ids_T[: batch.num_tokens],
            positions_N=batch.positions,
            slots_N=batch.slots,
            before_N=slots_before(batch, block_size=block_size),
            hidden_NW=side_by_side(aux_hidden_states, layers),
        )


class _Deferred(NamedTuple):
    token_id: int
    position: int
    before: int  # slot of the position before
    num_behind: int  # number of deferred tokens of the sequence up to this one, when it was added
    hidden_NW: Tensor  # hidden states of the step that computed it
    row: int  # row in hidden_NW


class DeferredEntries:
    """Deferred tokens by slot. Owned by the step thread.

    `add` runs in every step, when caches are cold, so it uses plain Python numbers and hardly any numpy or torch.
    """

    def __init__(self, num_slots: int, *, block_size: int) -> None:
        self._size = block_size
        self._deferred: dict[int, _Deferred] = {}  # by slot, in order of arrival
        # One extra element, for index UNKNOWN. All UNKNOWN between calls.
        self._place_of_S = np.full(num_slots + 1, UNKNOWN)

    def __len__(self) -> int:
        return len(self._deferred)

    def add(
        self, batch: Batch, hidden_NW: Tensor, accepts: Callable[[int, int], bool] = lambda slot, before: True
    ) -> None:
        """Add the tokens of a step, whose ids are on the host.

        A token replaces an earlier one at its slot, which was a rejected draft. hidden_NW: kept by reference. accepts:
        called for each token in order with its slot and the slot before.
        """
        tokens, positions = batch.token_ids.tolist(), batch.positions.tolist()
        slots, late = batch.slots.tolist(), self._deferred
        befores = list_before(batch, slots, positions, block_size=self._size)
        for i, (slot, before) in enumerate(zip(slots, befores, strict=True)):
            late.pop(slot, None)
            if accepts(slot, before):
                num_behind = 1 + (late[before].num_behind if before in late else 0)
                late[slot] = _Deferred(tokens[i], positions[i], before, num_behind, hidden_NW, i)

    def has(self, slot: int) -> bool:
        """Return True if the slot's token is deferred."""
        return slot in self._deferred

    def max_up_to(self, slot: int) -> int:
        """Return an upper bound of how many of the sequence's tokens up to this slot are deferred."""
        return self._deferred[slot].num_behind if slot in self._deferred else 0

    def up_to(self, slot: int) -> list[int]:
        """Return the slots of the sequence's deferred tokens up to this slot, in order. A draft after it needs all."""
        found: list[int] = []
        while slot in self._deferred:
            found.append(slot)
            slot = self._deferred[slot].before
        return found[::-1]

    def take(self, slots: Iterable[int] | None = None) -> Entries | None:
        """Remove and return the tokens of `slots`, or all. Forked sequences may list a slot twice."""
        taken = list(self._deferred if slots is None else dict.fromkeys(slots))
        if not taken:
            return None
        late = [self._deferred.pop(slot) for slot in taken]
        first_of: dict[int, int] = {}
        steps: list[Tensor] = []
        num_before = 0
        for one in late:
            if id(one.hidden_NW) not in first_of:
                first_of[id(one.hidden_NW)] = num_before
                steps.append(one.hidden_NW)
                num_before += len(one.hidden_NW)
        hidden_NW = steps[0] if len(steps) == 1 else torch.cat(steps)
        rows = [first_of[id(one.hidden_NW)] + one.row for one in late]
        is_in_order = rows == list(range(rows[0], rows[0] + len(rows)))
        return Entries(
            token_ids_N=torch.tensor([one.token_id for one in late], dtype=torch.int32),
            positions_N=np.array([one.position for one in late]),
            slots_N=np.array(taken),
            before_N=np.array([one.before for one in late]),
            hidden_NW=hidden_NW[rows[0] : rows[-1] + 1] if is_in_order else hidden_NW[torch.tensor(rows)],
        )

    def forget(self, slots: Iterable[int]) -> None:
        """Discard the deferred tokens of `slots`, which belong to the slots' previous owner."""
        for slot in slots:
            self._deferred.pop(slot, None)

    def drop(self) -> list[int]:
        """Discard all deferred tokens, and return their slots."""
        slots = list(self._deferred)
        self._deferred.clear()
        return slots

    def places(self, slots_N: Ints, wanted: Ints) -> Ints:
        """Return the last index of each wanted slot in slots_N; UNKNOWN if absent."""
        self._place_of_S[slots_N] = np.arange(len(slots_N))
        found: Ints = self._place_of_S[wanted]
        self._place_of_S[slots_N] = UNKNOWN
        return found


def side_by_side(aux_hidden_states: AuxHiddenStates, layers: tuple[int, ...]) -> Tensor:
    """Return the hidden states of `layers` concatenated, (N, W); a copy."""
    return torch.cat([aux_hidden_states[layer] for layer in layers], dim=-1)
