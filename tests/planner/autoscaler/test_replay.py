"""Autoscaler on a simulated deployment, end to end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from core.spec.schema import AutoscaleSpec, PoolBounds
from core.trace.trace import TraceRequest
from core.trace.traffic import Slo
from planner.autoscaler.decide import Autoscaler
from planner.autoscaler.pool_sizes import PoolSizes
from planner.autoscaler.replay import ScaledReplay
from planner.autoscaler.simulated_outlook import Fleets
from planner.simulator.profile import FleetSetup, load_profile
from planner.simulator.run import simulate

_PROFILE = load_profile("a100x8-llama-3.1-405b")
_SETUP = FleetSetup(num_prefill=1, num_decode=1, block_size=64, kv_tokens=65_536, prefix_fetches=True)
_SLO = Slo(10.0, 0.045)
_FLEETS = Fleets(setup=_SETUP, profile=_PROFILE, slo=_SLO)


def _requests(begin_s: float, end_s: float, *, every_s: float, num_tokens: int, num_output: int) -> list[TraceRequest]:
    count = int((end_s - begin_s) / every_s)
    return [
        TraceRequest(number=0, arrival_s=begin_s + i * every_s, num_tokens=num_tokens, num_output=num_output, ids=None)
        for i in range(count)
    ]


def _prompts(begin_s: float, end_s: float) -> list[TraceRequest]:
    """Return prompts that keep two prefill replicas busy, with hardly any decoding."""
    return _requests(begin_s, end_s, every_s=2.0, num_tokens=6000, num_output=10)


def _answers(begin_s: float, end_s: float) -> list[TraceRequest]:
    """Return a decode-heavy load: 40 concurrent streams, where one replica keeps its limit for 22."""
    return _requests(begin_s, end_s, every_s=0.25, num_tokens=64, num_output=200)


def _in_order(trace: list[TraceRequest]) -> list[TraceRequest]:
    return [replace(request, number=number) for number, request in enumerate(trace)]


def _replay(trace: list[TraceRequest], begin: PoolSizes, **more: Any) -> tuple[ScaledReplay, dict[str, Any]]:
    spec = AutoscaleSpec(
        slo_ttft_ms=10_000,
        slo_itl_ms=45,
        prefill=PoolBounds(max=3),
        decode=PoolBounds(max=3),
        max_devices=4,
        interval_s=20,
        **more,
    )
    autoscaler = Autoscaler(spec, devices=PoolSizes(1, 1))
    replay = ScaledReplay(_FLEETS, _in_order(trace), autoscaler, begin=begin, start_s=20.0, switch_s=2.0)
    return replay, replay.run()


def test_pools_follow_shifting_traffic_and_every_request_ends() -> None:
    trace = [*_prompts(0, 60), *_answers(60, 140)]
    replay, found = _replay(trace, PoolSizes(3, 1))
    assert found["completed"] == len(trace)
    assert replay.decisions[0].after == PoolSizes(3, 1) and replay.decisions[-1].after.decode >= 2
    assert any(decision.moves.to_decode for decision in replay.decisions)
    fixed = simulate(replace(_SETUP, num_prefill=3), _PROFILE, _in_order(trace), _SLO)
    assert found["good_share"] > 1.3 * fixed["good_share"]


@pytest.mark.slow
def test_constant_load_is_scaled_down_once() -> None:
    _, found = _replay(_prompts(0, 300), PoolSizes(3, 1), attainment=0.9)
    sizes = [tuple(decision["after"]) for decision in found["decisions"]]
    assert found["changes"] <= 1 and len(set(sizes[-6:])) == 1
    assert found["mean_replicas"] <= 4 and found["good_share"] == pytest.approx(1.0, abs=0.1)
