"""Tokens that wait to be put into the pool."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.heads.features import UNKNOWN
from engine.heads.late import Entries, LateEntries

_SLOTS = 40


def _entries(slots: list[int], first: int) -> Entries:
    """Numbered from `first` on."""
    numbers = torch.arange(first, first + len(slots))
    return Entries(
        token_ids_N=numbers,
        positions_N=numbers.numpy(),
        slots_N=np.array(slots, dtype=np.int64),
        before_N=np.array(slots, dtype=np.int64) - 1,
        hidden_NW=numbers.float().unsqueeze(-1),
    )


@given(steps=st.lists(st.lists(st.integers(0, _SLOTS - 1), unique=True, min_size=1, max_size=6), max_size=9))
def test_of_each_slot_the_last_that_came_is_taken_once(steps: list[list[int]]) -> None:
    late, expected, count = LateEntries(_SLOTS), dict[int, int](), 0
    for slots in steps:
        late.add(_entries(slots, count))
        for slot in slots:
            expected.pop(slot, None)
            expected[slot] = count
            count += 1
        assert late.has(np.arange(_SLOTS)).tolist() == [slot in expected for slot in range(_SLOTS)]
    taken = late.take()
    assert late.take() is None and not late.has(np.arange(_SLOTS)).any() and not late.are_enough
    if not steps:
        assert taken is None
        return
    assert taken
    found = dict(zip(taken.slots_N.tolist(), taken.positions_N.tolist(), strict=True))
    assert list(found.items()) == list(expected.items()), "in the order in which they came"
    numbers = list(found.values())
    assert taken.token_ids_N.tolist() == numbers == taken.hidden_NW.flatten().tolist()
    assert taken.before_N.tolist() == [slot - 1 for slot in found]
    places = late.places(taken.slots_N, taken.before_N).tolist()
    assert places == [list(found).index(slot - 1) if slot - 1 in found else UNKNOWN for slot in found]
