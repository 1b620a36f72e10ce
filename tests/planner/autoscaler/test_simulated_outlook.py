"""Input of the simulated outlook, and its extrapolation of one minute."""

from __future__ import annotations

import pytest

from core.trace.traffic import SeenRequest, Slo
from core.types.errors import SpecError
from planner.autoscaler.pool_sizes import PoolSizes
from planner.autoscaler.simulated_outlook import Fleets, SimulatedOutlook
from planner.simulator.profile import FleetSetup, load_profile

_SETUP = FleetSetup(
    num_prefill=1,
    num_decode=1,
    block_size=64,
    kv_tokens=65_536,
    prefix_fetches=True,
    waits_in_router=True,
)
_FLEETS = Fleets(setup=_SETUP, profile=load_profile("a100x8-llama-3.1-405b"), slo=Slo(22.0, 0.045))
_NOW_S = 180.0


def _outlook(*, num_tokens: int, every_s: float, num_waiting: int = 0) -> SimulatedOutlook:
    """Build the outlook; the last num_waiting requests have no token yet."""
    count = int(_NOW_S / every_s)
    requests = [
        SeenRequest(arrival_s=i * every_s, num_tokens=num_tokens, ids=None, num_output=5, ttft_s=4.0, itl_s=0.035)
        for i in range(count)
    ]
    for request in requests[count - num_waiting :]:
        request.num_output = request.ttft_s = request.itl_s = None
    found = SimulatedOutlook.of(_FLEETS, requests, now_s=_NOW_S, ahead_s=60.0)
    assert found
    return found


def test_a_slowly_growing_queue_is_detected_early() -> None:
    """Prompts of 0.39 s every 0.31 s: after one minute the last waits for 14 s, after two for too long."""
    outlook = _outlook(num_tokens=600, every_s=0.31)
    now = outlook.predict(PoolSizes(1, 1))
    assert now.good_share == 1.0 and now.expected_share < 0.9
    assert outlook.predict(PoolSizes(2, 1)).expected_share == 1.0


def test_load_of_prompts_beyond_every_pool_is_an_error() -> None:
    with pytest.raises(SpecError, match="no recent prompt fits a KV pool of 65536 tokens"):
        _outlook(num_tokens=70_000, every_s=3.35).predict(PoolSizes(1, 1))


def test_a_few_long_prompts_do_not_count_as_queue_growth() -> None:
    """Prompts of 3.6 s every 3.35 s: so few may coincide by chance."""
    now = _outlook(num_tokens=6000, every_s=3.35).predict(PoolSizes(1, 1))
    assert now.good_share == now.expected_share == 1.0


def test_a_shrinking_queue_scores_better_than_a_growing_one() -> None:
    """Thirty queued prompts take one replica nearly two minutes, so both sizes miss the limits in the first one."""
    outlook = _outlook(num_tokens=6000, every_s=3.35, num_waiting=30)
    one, two = outlook.predict(PoolSizes(1, 1)), outlook.predict(PoolSizes(2, 1))
    assert one.expected_share < 0.1 < 0.5 < two.expected_share


def test_an_ended_burst_is_not_prolonged() -> None:
    """Twelve prompts of 3.6 s arrive within eleven seconds, then none for 90 seconds: in total, half of one replica's
    capacity."""
    requests = [
        SeenRequest(arrival_s=10.0 + i, num_tokens=6000, ids=None, num_output=5, ttft_s=4.0, itl_s=0.035)
        for i in range(12)
    ]
    outlook = SimulatedOutlook.of(_FLEETS, requests, now_s=111.0, ahead_s=60.0)
    assert outlook
    now = outlook.predict(PoolSizes(1, 1))
    assert now.num == 12 and now.expected_share == now.good_share > 0.5
    assert outlook.predict(PoolSizes(1, 1), load=1.5).num == 12
