"""Tokens of steps of which a head that keeps KV has put nothing into the pool yet.

A step that decodes gives the head a token of each row, and for so few it takes nearly as long as for fifty: what it has
to read, and to call, is the same. So they wait until they are enough, or until somebody wants to know: who is about to
draft, to ship, to copy, to store a block, or to write to one.
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

# N tokens, S slots of the pool, W numbers that are known of each


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Tokens that a model's steps have computed."""

    token_ids_N: Tensor  # on the device
    positions_N: Ints
    slots_N: Ints  # of their KV
    before_N: Ints  # slot of the position before each; UNKNOWN where there is none
    hidden_NW: Tensor  # the model's hidden states that are wanted of them, side by side

    @classmethod
    def of(
        cls, batch: Batch, aux_hidden_states: AuxHiddenStates, layers: tuple[int, ...], *, block_size: int
    ) -> Entries:
        """Good until the next step."""
        assert aux_hidden_states.token_ids_T is not None
        return cls(
            token_ids_N=aux_hidden_states.token_ids_T[: batch.num_tokens],
            positions_N=batch.positions,
            slots_N=batch.slots,
            before_N=slots_before(batch, block_size=block_size),
            hidden_NW=side_by_side(aux_hidden_states, layers),
        )


class _Late(NamedTuple):
    """One that waits."""

    token_id: int
    position: int
    before: int  # slot
    num_behind: int  # entries that waited up to it, when it came, of its sequence
    hidden_NW: Tensor  # of its step
    row: int  # in that


class LateEntries:
    """Owned by the step thread. To add a step is done in each, with caches that are cold by then: so numbers are kept
    as they are in Python, and hardly anything of numpy or torch is called."""

    def __init__(self, num_slots: int, *, block_size: int) -> None:
        self._size = block_size
        self._late: dict[int, _Late] = {}  # by slot, in the order in which they came
        self._place_of_S = np.full(num_slots + 1, UNKNOWN)  # one more, which UNKNOWN finds; between calls all UNKNOWN

    def __len__(self) -> int:
        return len(self._late)

    def add(
        self, batch: Batch, hidden_NW: Tensor, is_kept: Callable[[int, int], bool] = lambda slot, before: True
    ) -> None:
        """Tokens of another step, which the host knows: of each slot the last counts, for those before it were drafts
        that turned out wrong. hidden_NW: ours. is_kept: asked of each, in order, with its slot and the one before."""
        tokens, positions = batch.token_ids.tolist(), batch.positions.tolist()
        slots, late = batch.slots.tolist(), self._late
        befores = list_before(batch, slots, positions, block_size=self._size)
        for i, (slot, before) in enumerate(zip(slots, befores, strict=True)):
            late.pop(slot, None)
            if is_kept(slot, before):
                num_behind = 1 + (late[before].num_behind if before in late else 0)
                late[slot] = _Late(tokens[i], positions[i], before, num_behind, hidden_NW, i)

    def has(self, slot: int) -> bool:
        """Whether something waits of it."""
        return slot in self._late

    def most_up_to(self, slot: int) -> int:
        """Entries of its sequence that wait up to there, at most."""
        return self._late[slot].num_behind if slot in self._late else 0

    def up_to(self, slot: int) -> list[int]:
        """The slots of the entries that wait up to there, one behind the other: those that a draft behind it needs."""
        found: list[int] = []
        while slot in self._late:
            found.append(slot)
            slot = self._late[slot].before
        return found[::-1]

    def take(self, slots: Iterable[int] | None = None) -> Entries | None:
        """These, which wait; or all. Other threads of a sequence's tokens may go on from the same ones."""
        taken = list(self._late if slots is None else dict.fromkeys(slots))
        if not taken:
            return None
        late = [self._late.pop(slot) for slot in taken]
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
        is_in_order = rows == list(range(rows[0], rows[0] + len(rows)))  # mostly
        return Entries(
            token_ids_N=torch.tensor([one.token_id for one in late], dtype=torch.int32),
            positions_N=np.array([one.position for one in late]),
            slots_N=np.array(taken),
            before_N=np.array([one.before for one in late]),
            hidden_NW=hidden_NW[rows[0] : rows[-1] + 1] if is_in_order else hidden_NW[torch.tensor(rows)],
        )

    def forget(self, slots: Iterable[int]) -> None:
        """What waits of them, perhaps nothing, is of whoever had these before."""
        for slot in slots:
            self._late.pop(slot, None)

    def drop(self) -> list[int]:
        """All that wait, never to be computed: their slots."""
        slots = list(self._late)
        self._late.clear()
        return slots

    def places(self, slots_N: Ints, wanted: Ints) -> Ints:
        """Where in slots_N each of the wanted ones is for the last time; UNKNOWN where it is not."""
        self._place_of_S[slots_N] = np.arange(len(slots_N))
        found: Ints = self._place_of_S[wanted]
        self._place_of_S[slots_N] = UNKNOWN
        return found


def side_by_side(aux_hidden_states: AuxHiddenStates, layers: tuple[int, ...]) -> Tensor:
    """(N, W): a copy."""
    return torch.cat([aux_hidden_states[layer] for layer in layers], dim=-1)
