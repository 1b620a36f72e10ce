"""Simulator on small synthetic traces whose outcome can be worked out by hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from core.trace.trace import TraceRequest, read_trace
from core.trace.traffic import Slo
from core.types.errors import SpecError
from planner.simulator.plan import make_plan
from planner.simulator.prefix_hashes import PrefixHashes
from planner.simulator.profile import Drafts, FleetSetup, Steps, WiderSteps, load_profile, shipped_profiles
from planner.simulator.run import simulate
from router.routing.candidates import CandidateReplica, Option, RoutingRequest

_PROFILE = load_profile("h100-llama-3.1-8b")
_SETUP = FleetSetup(num_prefill=0, num_decode=2, block_size=64, kv_tokens=65_536)


def _chat(num_users: int = 6, num_turns: int = 5, *, every_s: float = 2.0) -> list[TraceRequest]:
    """Each user's prompt grows by 1,024 tokens per turn; all begin with the same 512."""
    requests = []
    for turn in range(num_turns):
        for user in range(num_users):
            ids = (0, *range(1 + user * 100, 1 + user * 100 + 2 * (turn + 1)))
            requests.append(
                TraceRequest(
                    number=len(requests),
                    arrival_s=len(requests) * every_s,
                    num_tokens=512 * len(ids),
                    num_output=20,
                    ids=ids,
                )
            )
    return requests


@pytest.mark.parametrize("policy", ["cost", "prefix", "least_loaded", "round_robin"])
@pytest.mark.parametrize("pools", [(0, 3), (2, 2)])
def test_every_request_ends_and_all_blocks_come_back(policy: str, pools: tuple[int, int]) -> None:
    trace = _chat()
    setup = replace(_SETUP, num_prefill=pools[0], num_decode=pools[1], policy=policy)
    report = simulate(setup, _PROFILE, trace, Slo(10.0, 1.0))
    assert report["completed"] == len(trace) and report["good_share"] == 1.0
    assert report["output_tokens"] == 20 * len(trace)


class Silent:
    """Policy without predictions that records its input."""

    queues: ClassVar[list[float]] = []

    def options(
        self, demand: RoutingRequest, prefills: Sequence[CandidateReplica], decodes: Sequence[CandidateReplica]
    ) -> list[Option]:
        self.queues += [view.queue_s for view in prefills]
        return [Option(prefill=prefills[0].replica, decode=decodes[0].replica)]


def test_a_policy_without_predictions_sees_its_queues() -> None:
    trace = [TraceRequest(number=i, arrival_s=0.0, num_tokens=4096, num_output=2, ids=None) for i in range(3)]
    setup = replace(_SETUP, num_prefill=1, num_decode=1, policy=f"{__name__}:Silent")
    Silent.queues.clear()
    simulate(setup, _PROFILE, trace)
    first, second, third = Silent.queues
    assert first == 0.0 < second and third == pytest.approx(2 * second)


def test_one_replica_with_enough_room_reuses_all_prefixes() -> None:
    trace = _chat()
    report = simulate(replace(_SETUP, num_decode=1, kv_tokens=10**6), _PROFILE, trace)
    known, reusable = set[int](), 0
    for request in trace:
        assert request.ids
        depth = next((i for i, id in enumerate(request.ids) if id not in known), len(request.ids))
        reusable += 512 * depth
        known.update(request.ids)
    assert report["reuse_share"] == pytest.approx(reusable / sum(request.num_tokens for request in trace))


def test_a_lone_request_takes_the_time_of_the_profile() -> None:
    request = TraceRequest(number=0, arrival_s=0.0, num_tokens=4096, num_output=11, ids=None)
    setup = replace(_SETUP, num_decode=1, decode_batch_tokens=1024)
    report = simulate(setup, _PROFILE, [request])
    steps = _PROFILE.steps
    expected = 4 * steps.base_s + 4096 * steps.token_s + 4096 * 4097 / 2 * steps.pair_s
    assert report["ttft_ms"]["mean"] == pytest.approx(expected * 1e3)
    # Step k reads the prompt and the k tokens before it.
    itl = sum(steps.base_s + steps.token_s + steps.context_s * (4096 + k) for k in range(1, 11)) / 10
    assert report["itl_ms"]["mean"] == pytest.approx(itl * 1e3)


@pytest.mark.parametrize("drafts", [None, Drafts(accepted=[0.9, 0.8], ask_place_s=0.001)])
def test_a_simulation_is_reproducible(drafts: Drafts | None) -> None:
    profile = _PROFILE.model_copy(update={"drafts": drafts})
    first, second = (simulate(_SETUP, profile, _chat()) for _ in range(2))
    real = ("wall_s", "decision_us")
    assert first | dict.fromkeys(real) == second | dict.fromkeys(real)


def test_fetches_reuse_peer_blocks_and_a_host_tier_evicted_ones() -> None:
    trace = _chat(num_users=12, every_s=0.05)
    tight = replace(_SETUP, num_decode=3, kv_tokens=8192)
    alone = simulate(tight, _PROFILE, trace)
    tiered = simulate(replace(tight, host_tokens=10**6), _PROFILE, trace)
    pulling = simulate(replace(tight, host_tokens=10**6, prefix_fetches=True), _PROFILE, trace)
    assert alone["reuse_share"] < tiered["reuse_share"] <= pulling["reuse_share"]
    assert pulling["pull_bytes"] > 0 == tiered["pull_bytes"]


def test_a_prefill_replica_frees_its_fetched_blocks() -> None:
    trace = _chat(num_users=40, num_turns=6, every_s=0.02)
    setup = replace(_SETUP, num_prefill=6, num_decode=6, prefix_fetches=True)
    report = simulate(setup, _PROFILE, trace)
    assert report["completed"] == len(trace)
    assert report["pull_bytes"] > 0


def test_a_burst_of_siblings_is_spread_without_losing_one() -> None:
    ids = tuple(range(1, 9))
    trace = [TraceRequest(number=i, arrival_s=0.0, num_tokens=4096, num_output=8, ids=ids) for i in range(20)]
    report = simulate(_SETUP, _PROFILE, trace)
    assert report["completed"] == 20 and report["reuse_share"] > 0.7


def test_the_plan_is_the_smallest_that_keeps_the_slo() -> None:
    trace = _chat(num_users=10, num_turns=3, every_s=0.05)
    plan = make_plan(_SETUP, _PROFILE, trace, slo=Slo(0.5, 0.05), good_share=0.9, max_replicas=6)
    assert plan.best and plan.best.good_share >= 0.9
    assert all(c.good_share < 0.9 for c in plan.tried if c.size < plan.best.size)
    shares = [c.good_share for c in plan.frontier]
    assert shares == sorted(set(shares))


def test_plan_separates_roles_where_prompts_delay_answers() -> None:
    """Two steps at once do not slow each other down. Replicas may have one or two threads."""
    narrow = Steps(base_s=0.01, token_s=0.001, pair_s=0.0, context_s=0.0)
    wide = narrow.model_copy(update={"token_s": 0.001 / 1.8})
    changes = {"steps": narrow, "slowdown": [1.0, 1.0], "wider": [WiderSteps(width=2, steps=wide, decode_steps=wide)]}
    plan = make_plan(
        replace(_SETUP, decode_batch_tokens=1024, max_running=16),
        _PROFILE.model_copy(update=changes),
        [TraceRequest(number=i, arrival_s=0.6 * i, num_tokens=512, num_output=200, ids=None) for i in range(20)],
        slo=Slo(1.5, 0.016),
        good_share=0.95,
        max_replicas=2,
    )
    assert plan.best is plan.apart and plan.apart.size == plan.colocated.size == 2
    assert not plan.apart.is_colocated and plan.colocated.is_colocated
    assert plan.colocated.decode_batch_tokens < 1024, "shorter chunks were not tried"


def test_hashes_are_equal_only_for_equal_ids() -> None:
    def request(number: int, ids: tuple[int, ...] | None) -> TraceRequest:
        return TraceRequest(number=number, arrival_s=0, num_tokens=1000, num_output=1, ids=ids)

    hashes = PrefixHashes(64)
    one, twin, other = (hashes.of(request(i, ids)) for i, ids in enumerate([(1, 2), (1, 2), (1, 3)]))
    alone, also_alone = hashes.of(request(8, None)), hashes.of(request(9, None))
    assert one == twin and len(one) == 15 and len(set(one)) == 15
    assert one[:8] == other[:8] and not set(one[8:]) & set(other[8:])
    assert not set(alone) & set(also_alone) and not set(alone) & set(one)


def test_every_shipped_profile_loads_and_has_a_derivation() -> None:
    for name in shipped_profiles():
        profile = load_profile(name)
        assert profile.name == name and profile.origin == "derived" and len(profile.derivation) > 5
    with pytest.raises(SpecError, match="shipped profiles"):
        load_profile("nothing-like-it")


@pytest.mark.slow
@pytest.mark.skipif("CONVERSATION_TRACE" not in os.environ, reason="names the Mooncake conversation trace")
def test_round_robin_on_the_conversation_trace() -> None:
    trace = read_trace(Path(os.environ["CONVERSATION_TRACE"]))
    setup = FleetSetup(
        num_prefill=0, num_decode=8, policy="round_robin", block_size=64, kv_tokens=1_048_576, eviction="lru"
    )
    report = simulate(setup, _PROFILE, trace)
    assert report["completed"] == 12_031 and report["reuse_share"] == pytest.approx(0.082, abs=0.005)
