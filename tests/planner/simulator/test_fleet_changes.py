"""Replicas added and retired while requests run."""

from __future__ import annotations

import random

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
_SETUP = FleetSetup(num_prefill=2, num_decode=3, policy="cost", block_size=64, kv_tokens=65_536, prefix_fetches=True)


class _Site:
    def __init__(self, setup: FleetSetup = _SETUP) -> None:
        self.clock, self.report = Clock(), Report()
        self.fleet = Fleet(setup, _PROFILE, PrefixHashes(64), self.clock, self.report)
        self.gone: list[float] = []

    def retire(self, role: Role, at: float) -> None:
        self.clock.at(at, lambda: self.fleet.retire(role, lambda: self.gone.append(self.clock.now)))

    def check(self) -> None:
        for replica in (*self.fleet.prefills.values(), *self.fleet.decodes.values()):
            replica.store.blocks.check_integrity()
            assert replica.store.blocks.num_available == replica.store.blocks.num_blocks


def _trace(count: int, *, every_s: float = 1.0) -> list[TraceRequest]:
    draw = random.Random(3)
    return [
        TraceRequest(
            number=i, arrival_s=i * every_s, num_tokens=draw.randint(50, 900), num_output=draw.randint(1, 300), ids=None
        )
        for i in range(count)
    ]


def test_requests_end_once_and_no_block_is_lost_when_replicas_leave() -> None:
    site, trace = _Site(), _trace(120)
    feed(site.clock, site.fleet.arrive, trace)
    for role, at in ((Role.DECODE, 20.0), (Role.DECODE, 20.0), (Role.PREFILL, 40.0)):
        site.retire(role, at)
    site.clock.at(60.0, lambda: site.fleet.add(Role.DECODE))
    site.clock.run()
    assert sorted(flight.request.number for flight in site.report.flights) == [*range(120)]
    assert len(site.gone) == 3 and set(site.fleet.decodes) & {"decode-3"} and len(site.fleet.prefills) == 1
    site.check()


def test_an_answer_moves_with_its_tokens_and_hardly_pauses() -> None:
    [request] = [TraceRequest(number=0, arrival_s=0.0, num_tokens=2000, num_output=400, ids=None)]

    def run(*, moves: bool) -> float:
        site = _Site()
        feed(site.clock, site.fleet.arrive, [request])
        if moves:
            site.clock.at(10.0, lambda: site.fleet.retire(Role.DECODE, lambda: None))
            site.clock.at(10.1, lambda: site.fleet.retire(Role.DECODE, lambda: None))
        site.clock.run()
        site.check()
        return site.report.flights[0].ended_at

    assert run(moves=False) <= run(moves=True) < run(moves=False) + 0.5


def test_a_retired_replica_gets_no_requests_and_its_name_is_not_reused() -> None:
    site = _Site()
    name = site.fleet.retire(Role.PREFILL, lambda: None)
    assert name not in site.fleet.serving(Role.PREFILL)
    site.clock.run()
    assert site.fleet.add(Role.PREFILL) == "prefill-2" and name not in site.fleet.prefills


def test_a_placed_answer_continues_from_its_tokens() -> None:
    site = _Site()
    request = TraceRequest(number=0, arrival_s=0.0, num_tokens=1000, num_output=101, ids=None)
    site.fleet.place(request, 50)
    site.clock.run()
    [flight] = site.report.flights
    per_token = 0.031 + 590e-6 + 1075 * 20.1e-9
    assert flight.ended_at - 51 * per_token < 0.01
    site.check()


def test_warm_prompts_are_found() -> None:
    site = _Site()
    ids = tuple(range(4))
    past = TraceRequest(number=-1, arrival_s=0.0, num_tokens=2048, num_output=1, ids=ids)
    site.fleet.warm([past])
    site.fleet.arrive(TraceRequest(number=0, arrival_s=0.0, num_tokens=2048, num_output=2, ids=ids))
    site.clock.run()
    assert site.report.flights[0].num_cached >= 2048 - 64
    site.check()
