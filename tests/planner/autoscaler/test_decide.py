"""Invariants of the autoscaler's decisions under any load."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.spec.schema import AutoscaleSpec, PoolBounds
from core.trace.traffic import SeenRequest, Slo
from planner.autoscaler.decide import Autoscaler, AutoscaleState, Trust
from planner.autoscaler.forecast import Load, LoadForecast
from planner.autoscaler.observation import ChangePrice, Observation, Saturation
from planner.autoscaler.pool_sizes import Demand, PoolSizes
from planner.autoscaler.scaling_decision import Prediction, ScalingDecision

_PRICE = ChangePrice(start_prefill_s=60.0, start_decode_s=60.0, drain_s=1.0, switch_s=2.0)
_IDLE = Saturation(prefill=0.0, decode=0.0)
_ONE_EACH = PoolSizes(1, 1)
_LOADS = st.floats(min_value=0.01, max_value=20.0)
_FORECAST = LoadForecast(seen=Load(1.0, 100.0, 100.0), ahead=Load(1.0, 100.0, 100.0))


@dataclass
class FakeOutlook:
    """Outlook by arithmetic: a pool keeps its limit for nearly all requests up to 90 % utilization."""

    prefill: float  # replicas that the load keeps busy
    decode: float
    forecast: LoadForecast = _FORECAST

    def demand(self, *, reuse_share: float) -> Demand:
        return Demand(self.prefill, self.decode)

    def predict(self, sizes: PoolSizes, *, load: float = 1.0) -> Prediction:
        in_ttft = _kept(load * self.prefill / sizes.prefill)
        in_itl = _kept(load * self.decode / sizes.decode)
        return Prediction(
            sizes=sizes,
            load=load,
            good_share=in_ttft * in_itl,
            ttft_share=in_ttft,
            itl_share=in_itl,
            ttft_p50_s=0.5,
            ttft_p90_s=1.0,
            itl_s=0.02,
            reuse_share=0.0,
        )


def _kept(busy: float) -> float:
    return 1 / (1 + math.exp(min(50.0, 30.0 * (busy - 1.0))))


def _autoscaler(*, most: int = 15, max_devices: int = 16, devices: PoolSizes = _ONE_EACH, least: int = 1) -> Autoscaler:
    bounds = PoolBounds(min=least, max=most)
    spec = AutoscaleSpec(prefill=bounds, decode=bounds, max_devices=max_devices)
    return Autoscaler(spec, devices=devices)


def _seen(now_s: float, sizes: PoolSizes, **more: object) -> Observation:
    fields = {"requests": (), "saturation": _IDLE, "price": _PRICE, **more}
    return Observation(now_s=now_s, sizes=sizes, **fields)  # type: ignore[arg-type]


def _run(
    autoscaler: Autoscaler, loads: Iterable[FakeOutlook | None], begin: PoolSizes, state: AutoscaleState | None = None
) -> list[ScalingDecision]:
    """Make one decision per load, each applied at once."""
    state, sizes, found = state or AutoscaleState(), begin, []
    for number, load in enumerate(loads, start=1):
        state, decision = autoscaler.decide(state, _seen(30.0 * number, sizes), lambda load=load: load)  # type: ignore[misc]
        sizes = decision.after
        found.append(decision)
    return found


@given(st.lists(st.none() | st.builds(FakeOutlook, _LOADS, _LOADS), max_size=60), st.integers(1, 3), st.integers(1, 2))
def test_sizes_stay_within_limits_under_any_load(
    loads: list[FakeOutlook | None], prefill_devices: int, decode_devices: int
) -> None:
    autoscaler = _autoscaler(least=2, most=6, max_devices=16, devices=PoolSizes(prefill_devices, decode_devices))
    for decision in _run(autoscaler, loads, PoolSizes(1, 9)):
        assert autoscaler.limits.allow(decision.after), decision


@given(_LOADS, _LOADS, st.integers(1, 15), st.integers(1, 15))
def test_constant_load_converges_without_oscillation(prefill: float, decode: float, x: int, y: int) -> None:
    autoscaler = _autoscaler()
    found = _run(autoscaler, [FakeOutlook(prefill, decode)] * 120, PoolSizes(x, y))
    assert not any(decision.is_change for decision in found[60:])
    been = [decision.after for decision in found if decision.is_change]
    assert len(been) == len(set(been)), f"there and back again: {been}"


@given(_LOADS, _LOADS, st.floats(1.0, 3.0))
def test_more_load_never_converges_to_fewer_devices(prefill: float, decode: float, more: float) -> None:
    def rest(times: float) -> PoolSizes:
        autoscaler = _autoscaler()
        return _run(autoscaler, [FakeOutlook(prefill * times, decode * times)] * 60, PoolSizes(1, 1))[-1].after

    assert sum(rest(more)) >= sum(rest(1.0)) - 1  # the last replica may be in either pool


def test_shifted_load_changes_both_pools_in_one_decision() -> None:
    autoscaler = _autoscaler()
    [decision] = _run(autoscaler, [FakeOutlook(2.0, 11.0)], PoolSizes(13, 3))
    assert decision.after == PoolSizes(3, 13) or decision.after.decode >= 12, decision
    assert decision.moves.to_decode >= 9 and not decision.moves.start_prefill + decision.moves.start_decode
    assert "worth" in decision.reason and decision.worth_s > decision.price_s > 0


def test_a_single_decision_never_releases_devices() -> None:
    [decision] = _run(_autoscaler(), [FakeOutlook(9.0, 0.5)], PoolSizes(8, 5))
    assert decision.after.prefill > 8 and sum(decision.after) >= 13


def test_surplus_devices_go_to_the_busier_pool() -> None:
    """Half of the devices would be enough; the others move to the pool that the new load needs."""
    [decision] = _run(_autoscaler(), [FakeOutlook(1.5, 5.0)], PoolSizes(13, 3))
    assert decision.after == PoolSizes(4, 12), decision


def test_a_change_that_costs_more_than_it_saves_is_skipped() -> None:
    autoscaler = _autoscaler()
    dear = replace(_PRICE, drain_s=100_000.0)
    _, decision = autoscaler.decide(
        AutoscaleState(), _seen(30.0, PoolSizes(13, 3), price=dear), lambda: FakeOutlook(2.0, 11.0)
    )
    assert not decision.is_change and "not worth" in decision.reason


def test_premature_scale_down_doubles_the_stabilization_window() -> None:
    autoscaler = _autoscaler()
    low, high = FakeOutlook(1.0, 1.0), FakeOutlook(4.0, 4.0)

    def shrinks_after(loads: Callable[[int], FakeOutlook], count: int) -> list[int]:
        found = _run(autoscaler, [loads(i) for i in range(count)], PoolSizes(5, 5))
        return [d.number for d in found if sum(d.after) < sum(d.before)]

    first = shrinks_after(lambda i: low, 40)[0]
    again = shrinks_after(lambda i: high if i == first else low, 80)
    assert again[0] == first
    later = [number for number in again if number > first + 1]
    assert later[0] - (first + 1) >= 2 * first


def test_idle_pools_shrink_to_their_minimum() -> None:
    found = _run(_autoscaler(least=2), [None] * 30, PoolSizes(6, 6))
    assert not found[0].is_change and found[0].mode == "idle"
    assert found[-1].after == PoolSizes(2, 2)


def _answered(count: int, *, now_s: float, ttft_s: float, itl_s: float) -> list[SeenRequest]:
    return [
        SeenRequest(arrival_s=now_s - 10, num_tokens=10, ids=None, num_output=5, ttft_s=ttft_s, itl_s=itl_s)
        for _ in range(count)
    ]


def test_an_inaccurate_simulator_is_not_used_until_it_is_accurate_again() -> None:
    autoscaler, sizes, state = _autoscaler(), PoolSizes(4, 4), AutoscaleState()
    full = Saturation(prefill=0.1, decode=1.2)
    modes = []
    for number in range(1, 30):
        is_off = number < 12
        seen = _seen(
            30.0 * number,
            sizes,
            requests=_answered(50, now_s=30.0 * number, ttft_s=0.5, itl_s=0.2 if is_off else 0.02),
            saturation=full if is_off else _IDLE,
        )
        state, decision = autoscaler.decide(state, seen, lambda: FakeOutlook(3.2, 3.2))
        modes.append(decision.mode)
        if decision.mode == "saturation" and decision.is_change and is_off:
            assert decision.moves.to_decode or decision.moves.start_decode
            assert "off by more than" in decision.reason
        sizes = decision.after if decision.mode != "simulator" else sizes
    assert modes[0] == "simulator" and "saturation" in modes and modes[-1] == "simulator"


@pytest.mark.parametrize(
    ("before", "prefill", "decode", "after"),
    [
        (PoolSizes(1, 3), 1.93, 0.58, PoolSizes(2, 2)),  # seen live: no spare device, and decode is not cold
        (PoolSizes(3, 1), 0.4, 1.5, PoolSizes(2, 2)),
        (PoolSizes(2, 2), 1.0, 0.8, PoolSizes(2, 2)),  # decode would become too small
        (PoolSizes(2, 2), 1.9, 1.7, PoolSizes(2, 2)),
        (PoolSizes(3, 1), 1.2, 0.1, PoolSizes(3, 1)),  # the last decode replica stays
    ],
)
def test_a_hot_pool_gets_a_replica_from_the_other(
    before: PoolSizes, prefill: float, decode: float, after: PoolSizes
) -> None:
    state = AutoscaleState(trust=Trust(itl_log=2.0, is_trusted=False))
    seen = _seen(30.0, before, saturation=Saturation(prefill=prefill, decode=decode))
    _, decision = _autoscaler(max_devices=4).decide(state, seen, lambda: FakeOutlook(1, 1))
    assert (decision.mode, decision.after) == ("saturation", after)


def test_trust_in_the_simulator_returns_with_few_requests_per_interval() -> None:
    predicted = FakeOutlook(1, 1).predict(PoolSizes(2, 2))
    measured = {"num": 4.0, "good_share": 1.0, "ttft_p50_s": predicted.ttft_p50_s, "itl_s": predicted.itl_s}
    trust = Trust(itl_log=1.0, is_trusted=False)
    for _ in range(12):
        trust = trust.after(predicted, measured, Slo(1.0, 0.1))
    assert trust.is_trusted


def test_few_requests_do_not_end_trust_in_the_simulator() -> None:
    predicted = FakeOutlook(1, 1).predict(PoolSizes(2, 2))
    measured = {"num": 3.0, "good_share": 0.0, "ttft_p50_s": 99.0, "itl_s": 9.0}
    trust = Trust()
    for _ in range(20):
        trust = trust.after(predicted, measured, Slo(2.0, 0.05))
    assert trust == Trust()


def test_unexpected_slo_misses_raise_the_load_correction() -> None:
    autoscaler, state, sizes = _autoscaler(), AutoscaleState(), PoolSizes(4, 4)
    for number in range(1, 8):
        missed = _answered(50, now_s=30.0 * number, ttft_s=2.5, itl_s=0.02)
        state, decision = autoscaler.decide(
            state, _seen(30.0 * number, sizes, requests=missed), lambda: FakeOutlook(3.2, 1.0)
        )
        if decision.is_change:
            break
    assert decision.after.prefill > 4 and state.correction > 1.0
    assert any(isinstance(p, Prediction) and p.load > 1.0 for p in decision.tried)


def test_sizes_outside_new_limits_are_corrected_at_once() -> None:
    [decision] = _run(_autoscaler(most=4, max_devices=6), [FakeOutlook(1.0, 1.0)], PoolSizes(9, 2))
    assert decision.mode == "limits" and decision.after == PoolSizes(4, 2)


def test_decision_json_round_trip() -> None:
    [decision] = _run(_autoscaler(), [FakeOutlook(2.0, 11.0)], PoolSizes(13, 3))
    assert ScalingDecision.of(decision.as_dict()) == decision
