"""DeferredEntries: tokens whose draft KV is not in the pool yet."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.spec_decode.heads.deferred_kv import DeferredEntries
from engine.spec_decode.heads.features import UNKNOWN

_SLOTS, _SIZE = 40, 8


def _batch(slots: list[int], first: int) -> Batch:
    """Return a batch of rows of one token each, numbered from `first` on, at these slots."""
    rows = [
        Row(token_ids=[first + i], start=slot % _SIZE, blocks=[slot // _SIZE], num_logits=1)
        for i, slot in enumerate(slots)
    ]
    return Batch.of(rows, block_size=_SIZE)


@given(steps=st.lists(st.lists(st.integers(0, _SLOTS - 1), unique=True, min_size=1, max_size=6), max_size=9))
def test_last_entry_of_each_slot_is_taken_once(steps: list[list[int]]) -> None:
    late, expected, count = DeferredEntries(_SLOTS, block_size=_SIZE), dict[int, int](), 0
    for slots in steps:
        numbers = torch.arange(count, count + len(slots))
        late.add(_batch(slots, count), numbers.float().unsqueeze(-1))
        for slot in slots:
            expected.pop(slot, None)
            expected[slot] = count
            count += 1
        assert [late.has(slot) for slot in range(_SLOTS)] == [slot in expected for slot in range(_SLOTS)]
    taken = late.take()
    assert late.take() is None and not any(map(late.has, range(_SLOTS))) and not len(late)
    if not steps:
        assert taken is None
        return
    assert taken
    found = dict(zip(taken.slots_N.tolist(), taken.token_ids_N.tolist(), strict=True))
    assert list(found.items()) == list(expected.items()), "expected the order of arrival"
    numbers = list(found.values())
    assert numbers == taken.hidden_NW.flatten().tolist()
    assert taken.positions_N.tolist() == [slot % _SIZE for slot in found]
    before = [slot - 1 if slot % _SIZE else UNKNOWN for slot in found]
    assert taken.before_N.tolist() == before
    places = late.places(taken.slots_N, taken.before_N).tolist()
    assert places == [list(found).index(slot) if slot in found else UNKNOWN for slot in before]
