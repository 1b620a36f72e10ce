"""Queueing in the simulated router, as in the real one, and replicas added and retired while requests run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from core.trace.trace import TraceRequest
from core.types.request import Role
from planner.simulator.fleet import Fleet
from planner.simulator.prefix_hashes import PrefixHashes
from planner.simulator.profile import KV, FleetSetup, load_profile

_PROFILE = load_profile("a100x8-llama-3.1-405b")
_SETUP = FleetSetup(num_prefill=2, num_decode=3, block_size=64, kv_tokens=65_536, prefix_fetches=True)
_QUEUED = replace(_SETUP, num_prefill=1, num_decode=2, waits_in_router=True)


def _fleet(setup: FleetSetup = _SETUP) -> Fleet:
    return Fleet(setup, _PROFILE, PrefixHashes(64))


def _run(fleet: Fleet, trace: list[TraceRequest]) -> None:
    """Run the trace. Every request ends once, and every block comes back."""
    fleet.run(trace)
    assert all(flight.ended_at for flight in fleet.flights)
    for replica in (*fleet.prefills.values(), *fleet.decodes.values()):
        replica.store.blocks.check_integrity()
        assert replica.store.blocks.num_available == replica.store.blocks.num_blocks


def _request(
    number: int = 0,
    *,
    num_tokens: int,
    num_output: int,
    arrival_s: float = 0.0,
    ids: tuple[int, ...] | None = None,
) -> TraceRequest:
    return TraceRequest(number=number, arrival_s=arrival_s, num_tokens=num_tokens, num_output=num_output, ids=ids)


def _at_once(count: int, *, num_tokens: int, num_output: int) -> list[TraceRequest]:
    return [_request(i, arrival_s=0.01 * i, num_tokens=num_tokens, num_output=num_output) for i in range(count)]


def test_a_new_prefill_replica_computes_queued_prompts() -> None:
    def last_first_token(setup: FleetSetup) -> float:
        fleet = _fleet(setup)
        fleet.clock.at(5.0, lambda: fleet.add(Role.PREFILL))
        _run(fleet, _at_once(20, num_tokens=4000, num_output=5))
        return max(flight.ttft_s for flight in fleet.flights)

    assert last_first_token(_QUEUED) < 0.65 * last_first_token(replace(_QUEUED, waits_in_router=False))


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_retiring_replica_does_not_wait_for_queued_prompts(role: Role) -> None:
    """Twenty prompts are 48 s of work for one prefill replica."""
    gone: list[float] = []
    fleet = _fleet(replace(_QUEUED, num_prefill=2))
    fleet.clock.at(2.0, lambda: fleet.retire(role, lambda: gone.append(fleet.clock.now)))
    _run(fleet, _at_once(20, num_tokens=4000, num_output=5))
    assert gone[0] < 10.0


def test_decode_replicas_get_at_most_max_running_streams() -> None:
    fleet = _fleet(replace(_QUEUED, num_prefill=3, max_running=4))
    most: list[int] = []
    for when in range(1, 60):
        fleet.clock.at(when / 4, lambda: most.extend(replica.num_streams for replica in fleet.decodes.values()))
    _run(fleet, _at_once(30, num_tokens=100, num_output=50))
    assert max(most) == 4


def test_requests_end_once_and_no_block_is_lost_when_replicas_leave() -> None:
    draw, gone = random.Random(3), list[float]()
    trace = [
        _request(i, arrival_s=float(i), num_tokens=draw.randint(50, 900), num_output=draw.randint(1, 300))
        for i in range(120)
    ]
    fleet = _fleet()
    for role, at in ((Role.DECODE, 20.0), (Role.DECODE, 20.0), (Role.PREFILL, 40.0)):
        fleet.clock.at(at, lambda role=role: fleet.retire(role, lambda: gone.append(fleet.clock.now)))
    fleet.clock.at(60.0, lambda: fleet.add(Role.DECODE))
    _run(fleet, trace)
    assert len(gone) == 3 and "decode-3" in fleet.decodes and len(fleet.prefills) == 1


def test_an_answer_moves_with_its_tokens_and_hardly_pauses() -> None:
    def run(*, moves: bool) -> float:
        fleet = _fleet()
        for at in (10.0, 10.1) if moves else ():
            fleet.clock.at(at, lambda: fleet.retire(Role.DECODE, lambda: None))
        _run(fleet, [_request(num_tokens=2000, num_output=400)])
        return fleet.flights[0].ended_at

    assert run(moves=False) <= run(moves=True) < run(moves=False) + 0.5


def test_a_retired_replica_gets_no_requests_and_its_name_is_not_reused() -> None:
    fleet = _fleet()
    name = fleet.retire(Role.PREFILL, lambda: None)
    assert name not in [replica.name for replica in fleet.serving(Role.PREFILL)]
    fleet.clock.run()
    assert fleet.add(Role.PREFILL) == "prefill-2" and name not in fleet.prefills


def test_a_placed_answer_continues_from_its_tokens() -> None:
    fleet = _fleet()
    fleet.place(_request(num_tokens=1000, num_output=101), 50)
    _run(fleet, [])
    [flight] = fleet.flights
    per_token = 0.031 + 590e-6 + 1075 * 20.1e-9
    assert flight.ended_at - 51 * per_token < 0.01


def test_warm_prompts_are_found() -> None:
    fleet, ids = _fleet(), tuple(range(4))
    fleet.warm([_request(-1, num_tokens=2048, num_output=1, ids=ids)])
    _run(fleet, [_request(num_tokens=2048, num_output=2, ids=ids)])
    assert fleet.flights[0].num_cached >= 2048 - 64


@pytest.mark.parametrize("setup", [_SETUP, _QUEUED, replace(_SETUP, num_prefill=0)])
def test_requests_beyond_the_pool_are_refused_or_cut(setup: FleetSetup) -> None:
    small = replace(setup, kv_tokens=1000)  # 15 blocks
    fleet = _fleet(small)
    trace = [_request(number, num_tokens=count, num_output=2000) for number, count in enumerate((100, 900, 959, 960))]
    _run(fleet, trace)
    assert sorted(flight.request.num_output for flight in fleet.flights) == [1, 60, 860]
    assert fleet.num_refused == 1
    placed = _fleet(small)
    placed.place(_request(num_tokens=500, num_output=2000), 100)
    placed.place(_request(number=1, num_tokens=500, num_output=2000), 460)  # the pool has no room for a next token
    _run(placed, [])
    assert [flight.request.num_output for flight in placed.flights] == [460]


def test_a_profile_has_states_or_windows() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        KV(**_PROFILE.kv.model_dump() | {"window": 512, "state_bytes": 1000})
