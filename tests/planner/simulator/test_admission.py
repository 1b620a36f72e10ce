"""Queueing in the simulated router, as in the real one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.trace.trace import TraceRequest
from core.types.request import Role
from planner.simulator.clock import Clock
from planner.simulator.fleet import Fleet
from planner.simulator.fleet_setup import FleetSetup
from planner.simulator.prefix_hashes import PrefixHashes
from planner.simulator.profile import load_profile
from planner.simulator.report import Report
from planner.simulator.run import feed

_PROFILE = load_profile("a100x8-llama-3.1-405b")
_SETUP = FleetSetup(
    num_prefill=1,
    num_decode=2,
    policy="cost",
    block_size=64,
    kv_tokens=65_536,
    prefix_fetches=True,
    waits_in_router=True,
)


class _Site:
    def __init__(self, setup: FleetSetup) -> None:
        self.clock, self.report = Clock(), Report()
        self.fleet = Fleet(setup, _PROFILE, PrefixHashes(64), self.clock, self.report)

    def run(self, trace: list[TraceRequest]) -> None:
        feed(self.clock, self.fleet.arrive, trace)
        self.clock.run()
        assert sorted(flight.request.number for flight in self.report.flights) == [*range(len(trace))]
        for replica in (*self.fleet.prefills.values(), *self.fleet.decodes.values()):
            replica.store.blocks.check_integrity()
            assert replica.store.blocks.num_available == replica.store.blocks.num_blocks


def _at_once(count: int, *, num_tokens: int, num_output: int) -> list[TraceRequest]:
    return [
        TraceRequest(number=i, arrival_s=0.01 * i, num_tokens=num_tokens, num_output=num_output, ids=None)
        for i in range(count)
    ]


def test_a_new_prefill_replica_computes_queued_prompts() -> None:
    def last_first_token(setup: FleetSetup) -> float:
        site = _Site(setup)
        site.clock.at(5.0, lambda: site.fleet.add(Role.PREFILL))
        site.run(_at_once(20, num_tokens=4000, num_output=5))
        return max(flight.ttft_s for flight in site.report.flights)

    assert last_first_token(_SETUP) < 0.65 * last_first_token(replace(_SETUP, waits_in_router=False))


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_retiring_replica_does_not_wait_for_queued_prompts(role: Role) -> None:
    """Twenty prompts are 48 s of work for one prefill replica."""
    gone: list[float] = []
    site = _Site(replace(_SETUP, num_prefill=2))
    site.clock.at(2.0, lambda: site.fleet.retire(role, lambda: gone.append(site.clock.now)))
    site.run(_at_once(20, num_tokens=4000, num_output=5))
    assert gone[0] < 10.0


def test_decode_replicas_get_at_most_max_running_streams() -> None:
    site = _Site(replace(_SETUP, num_prefill=3, max_running=4))
    most: list[int] = []
    for when in range(1, 60):
        site.clock.at(when / 4, lambda: most.extend(use.num_streams for use in site.fleet.loads(Role.DECODE)))
    site.run(_at_once(30, num_tokens=100, num_output=50))
    assert max(most) == 4
