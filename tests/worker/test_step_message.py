"""Encoding of orders and rows between the ranks of a replica."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.types.errors import ReplicaFailed
from core.types.handoff import Handoff
from core.types.tier import Tier
from engine.batch.rows import Row, RowChanges
from engine.scheduler.step_commands import BeginOrder, CommitOrder, DeviceTokenOrder, DraftOrder, Orders, ShipOrder
from engine.tiers.commands import LoadOrder, LoadSource, Save, Spill, TierOrders
from worker.gang_runner import decode_step, encode_step

_numbers = st.integers(0, 2**40)
_keys = st.tuples(st.text(), _numbers)
_hashes = st.binary(min_size=16, max_size=16)
_tiers = st.sampled_from(Tier)
_handoffs = st.builds(
    Handoff,
    id=st.text(),
    epoch=_numbers,
    replica=st.text(),
    ranks=st.lists(st.text()).map(tuple),
    layout=st.text(),
    num_tokens=_numbers,
    max_tokens=_numbers,
    first_token=_numbers,
    ttl_s=st.floats(0, 1e6),
)
_states = st.none() | _numbers
_begins = st.builds(BeginOrder, _handoffs, st.lists(_numbers), _numbers, _states)
_ships = st.builds(ShipOrder, _keys, st.lists(_numbers), _numbers, _numbers, _states)
_commits = st.builds(CommitOrder, _keys, _numbers, st.lists(_numbers))
_loads = st.builds(LoadOrder, _numbers, st.lists(st.builds(LoadSource, _tiers, _numbers, _hashes, _numbers)))
_tier_orders = st.builds(
    TierOrders,
    st.lists(st.builds(Spill, _numbers, _numbers, _hashes)),
    st.lists(st.builds(Save, _tiers, _numbers, _numbers, _hashes)),
    st.lists(_loads),
)
_orders = st.builds(
    Orders,
    tiers=st.lists(_tier_orders, max_size=2),
    copies=st.lists(st.tuples(_numbers, _numbers)),
    served_fetches=st.lists(_begins, max_size=2),
    begins=st.lists(_begins, max_size=2),
    ships=st.lists(_ships, max_size=2),
    commits=st.lists(_commits, max_size=2),
    aborts=st.lists(_keys),
    rows=st.lists(st.none() | _keys),
    device_tokens=st.none() | st.builds(DeviceTokenOrder, _numbers, st.lists(_numbers), st.lists(_numbers)),
    draft=st.none() | st.builds(DraftOrder, st.lists(st.tuples(_numbers, _numbers, st.lists(_numbers))), _numbers),
    stop=st.booleans(),
)


@given(_orders)
def test_orders_survive_encoding(orders: Orders) -> None:
    batch, decoded = decode_step(encode_step(None, orders))
    assert batch is None and decoded == orders
    assert bool(decoded) == bool(orders)
    for tiers in decoded.tiers:  # a plain number would not be a key of a rank's stores
        assert all(isinstance(save.tier, Tier) for save in tiers.saves)


@given(_orders, st.integers(1, 20))
def test_rows_survive_encoding_for_any_orders(orders: Orders, length: int) -> None:
    row = Row(token_ids=list(range(length)), start=3, blocks=[4, 7, 2], num_logits=length, adapter=2)
    changes = RowChanges.of([row], block_size=8)
    decoded, _ = decode_step(encode_step(changes, orders))
    assert decoded is not None
    for name, numbers in vars(changes).items():
        np.testing.assert_array_equal(getattr(decoded, name), numbers)


def test_no_orders_are_false_and_any_order_is_true() -> None:
    assert not Orders()
    assert Orders(stop=True) and Orders(copies=[(1, 2)]) and Orders(rows=[None])


@pytest.mark.parametrize(
    "malformed",
    [
        {"copies": [[1]]},
        {"copies": [["1", "2"]]},
        {"aborts": [["handoff", 1, 2]]},
        {"rows": [7]},
        {"stop": 1},
        {"begins": [{"blocks": [], "num_tokens": 0}]},
        {"ships": [{"key": ["h", 1], "blocks": [0.5], "start": 0, "end": 1}]},
        {"tiers": [{"saves": [[9, 1, 1, b""]]}]},
        [],
    ],
)
def test_malformed_orders_are_rejected(malformed: object) -> None:
    packed = msgspec.msgpack.encode(malformed)
    with pytest.raises(ReplicaFailed, match="malformed step message from rank 0"):
        decode_step(len(packed).to_bytes(4, "little") + packed)


def test_truncated_message_is_rejected() -> None:
    data = encode_step(None, Orders(aborts=[("handoff", 1)]))
    with pytest.raises(ReplicaFailed, match="malformed step message from rank 0"):
        decode_step(data[: len(data) // 2])


@pytest.mark.parametrize(
    "data", [b"", b"\1", b"\xff" * 4, bytes(4), encode_step(None, Orders()) + b"7 bytes"], ids=repr
)
def test_message_of_wrong_length_is_rejected(data: bytes) -> None:
    with pytest.raises(ReplicaFailed, match="malformed step message from rank 0"):
        decode_step(data)


@pytest.mark.parametrize(
    "header", [[1, 1, 1, 1, 1], [1, -1, 1, 1, 1], [1, 1 << 60, 1 << 60, 1, 1], [5], [1, 0, 0, 0, 0, 7]], ids=str
)
def test_rows_that_contradict_their_header_are_rejected(header: list[int]) -> None:
    data = encode_step(None, Orders())
    data += bytes(-len(data) % 8) + np.array(header, dtype=np.int64).tobytes()
    with pytest.raises(ReplicaFailed, match="malformed step message from rank 0"):
        decode_step(data)
