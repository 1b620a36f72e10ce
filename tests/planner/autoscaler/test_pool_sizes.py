"""Sizes, limits and the moves between sizes."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from planner.autoscaler.pool_sizes import PoolSizes, ScaleLimits, ScaleMoves

_SIZES = st.builds(PoolSizes, st.integers(1, 20), st.integers(1, 20))


@given(_SIZES, _SIZES, st.booleans())
def test_moves_lead_between_sizes_and_prefer_switches(before: PoolSizes, after: PoolSizes, has_switch: bool) -> None:
    moves = ScaleMoves.between(before, after, has_switch=has_switch)
    prefill = before.prefill + moves.to_prefill - moves.to_decode + moves.start_prefill - moves.stop_prefill
    decode = before.decode + moves.to_decode - moves.to_prefill + moves.start_decode - moves.stop_decode
    assert PoolSizes(prefill, decode) == after
    assert min(vars(moves).values()) >= 0
    if has_switch and sum(before) == sum(after):
        assert moves.start_prefill == moves.start_decode == 0
    if not has_switch:
        assert moves.num_switches == 0


@example(3.5, 21.0, 3, 4, 1, 59)  # twelve decode replicas are as busy beside two prefill replicas as beside three
@given(st.floats(0, 40), st.floats(0, 40), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(8, 60))
def test_nearest_sizes_are_allowed_and_cover_the_demand_if_possible(
    prefill: float, decode: float, prefill_devices: int, decode_devices: int, least: int, max_devices: int
) -> None:
    limits = ScaleLimits(
        least=PoolSizes(1, 1),
        most=PoolSizes(12, 12),
        devices=PoolSizes(prefill_devices, decode_devices),
        max_devices=max_devices,
    )
    found = limits.nearest(prefill, decode)
    assert limits.allow(found)
    if limits.num_devices(found) < max_devices - max(limits.devices):
        assert found.prefill >= min(prefill, 12) and found.decode >= min(decode, 12)


@given(st.floats(0.1, 40), st.floats(0.1, 40), st.integers(1, 3), st.integers(1, 3), st.integers(8, 40))
def test_evenly_returns_the_least_busy_split(
    prefill: float, decode: float, prefill_devices: int, decode_devices: int, num_devices: int
) -> None:
    limits = ScaleLimits(
        least=PoolSizes(1, 1),
        most=PoolSizes(12, 12),
        devices=PoolSizes(prefill_devices, decode_devices),
        max_devices=40,
    )
    found = limits.evenly(prefill, decode, num_devices=num_devices)
    others = [PoolSizes(x, y) for x in range(1, 13) for y in range(1, 13)]
    busy = {s: max(prefill / s.prefill, decode / s.decode) for s in others if limits.num_devices(s) <= num_devices}
    assert busy[found] == min(busy.values())
