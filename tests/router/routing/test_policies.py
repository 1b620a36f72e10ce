"""Conformance suite for all policies, and tests of the cost policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from core.model.kv_memory import CacheShape
from core.types.step_timing import StepTiming
from router.routing.plain_policies import POLICIES, make_policy
from router.routing.policy import CandidateReplica, RoutingRequest

_DEMAND = RoutingRequest(num_tokens=4096, cache=CacheShape(block_size=64, token_bytes=1000), max_local_tokens=16)
_IDLE = CandidateReplica(
    replica="",
    cached_tokens=0,
    stored_tokens=0,
    queue_s=0.0,
    num_streams=0,
    num_blocks=1000,
    available_blocks=1000,
    timing=StepTiming(base_s=0.005, token_s=1e-4, pair_s=1e-9, context_s=1e-8),
    max_batch_tokens=2048,
    link_bytes_per_s=1e9,
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "any_policy" in metafunc.fixturenames:
        metafunc.parametrize("any_policy", [*POLICIES, *metafunc.config.getoption("policy")])


def _views(kind: str, count: int = 3) -> list[CandidateReplica]:
    return [replace(_IDLE, replica=f"{kind}-{i}") for i in range(count)]


def _holding(view: CandidateReplica, tokens: int) -> CandidateReplica:
    return replace(view, cached_tokens=tokens, stored_tokens=tokens)


def _busy(views: list[CandidateReplica]) -> list[CandidateReplica]:
    """Give each replica a different drawback."""
    changes: list[dict[str, Any]] = [
        {"queue_s": 50.0},
        {"available_blocks": 0, "num_streams": 64},
        {"cached_tokens": 4096, "stored_tokens": 4096, "restore_bytes_per_s": 1e9},
    ]
    return [replace(view, **change) for view, change in zip(views, changes, strict=False)]


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("num_prefill", [0, 1, 3])
def test_every_policy_names_a_pair_that_exists(any_policy: str, num_prefill: int, is_busy: bool) -> None:
    prefills, decodes = _views("p", num_prefill), _views("d")
    if is_busy:
        prefills, decodes = _busy(prefills), _busy(decodes)
    before = [replace(view) for view in (*prefills, *decodes)]
    options = make_policy(any_policy).options(_DEMAND, prefills, decodes)
    assert isinstance(options, Sequence) and options
    assert [*prefills, *decodes] == before, "the policy has modified its input"
    names = {view.replica for view in before}
    uncached = {view.replica: _DEMAND.num_tokens - view.cached_tokens for view in decodes}
    for option in options:
        assert option.decode in [view.replica for view in decodes]
        if option.prefill is None:  # the decode replica computes the prompt, where it may
            assert not prefills or uncached[option.decode] <= _DEMAND.max_local_tokens
        else:
            assert option.prefill in [view.replica for view in prefills]
        assert option.fetch_from is None or option.fetch_from in names
        assert 0 <= option.fetch_tokens <= _DEMAND.num_tokens


def test_every_policy_returns_nothing_without_a_decode_replica(any_policy: str) -> None:
    assert list(make_policy(any_policy).options(_DEMAND, _views("p"), [])) == []


@pytest.mark.parametrize("name", ["cost", "prefix", "least_loaded"])
def test_a_long_queue_is_avoided(name: str) -> None:
    prefills = [replace(view, queue_s=100.0 if i < 2 else 0.0) for i, view in enumerate(_views("p"))]
    assert make_policy(name).options(_DEMAND, prefills, _views("d"))[0].prefill == "p-2"


@pytest.mark.parametrize("name", ["cost", "prefix"])
def test_the_holder_of_the_prefix_is_preferred(name: str) -> None:
    prefills = _views("p")
    prefills[1] = _holding(prefills[1], 2048)
    assert make_policy(name).options(_DEMAND, prefills, _views("d"))[0].prefill == "p-1"


def test_round_robin_visits_every_replica() -> None:
    policy = make_policy("round_robin")
    chosen = [policy.options(_DEMAND, [], _views("d"))[0].decode for _ in range(6)]
    assert sorted(chosen[:3]) == ["d-0", "d-1", "d-2"] and chosen[3:] == chosen[:3]


def test_prefix_policy_ignores_affinity_under_uneven_load() -> None:
    decodes = _views("d")
    decodes[0] = replace(_holding(decodes[0], 4096), num_streams=100)
    assert make_policy("prefix").options(_DEMAND, [], decodes)[0].decode != "d-0"


def test_a_busy_holder_gives_its_blocks_to_an_idle_peer() -> None:
    prefills = _views("p")
    prefills[0] = replace(_holding(prefills[0], 4032), queue_s=5.0)
    best = make_policy("cost", prefix_fetches=True).options(_DEMAND, prefills, _views("d"))[0]
    assert best.prefill != "p-0" and (best.fetch_from, best.fetch_tokens) == ("p-0", 4032)
    assert make_policy("cost").options(_DEMAND, prefills, _views("d"))[0].fetch_from is None


def test_nothing_is_fetched_over_a_slow_link() -> None:
    prefills = _views("p")
    prefills[0] = replace(_holding(prefills[0], 4032), queue_s=5.0, link_bytes_per_s=1e3)
    assert make_policy("cost", prefix_fetches=True).options(_DEMAND, prefills, _views("d"))[0].fetch_from is None


def test_a_lower_tier_is_read_rather_than_computed() -> None:
    prefills = _views("p", 1)
    prefills[0] = replace(prefills[0], stored_tokens=4032, restore_bytes_per_s=1e10)
    best = make_policy("cost").options(_DEMAND, prefills, _views("d"))[0]
    assert (best.fetch_from, best.fetch_tokens) == ("p-0", 4032)


def test_a_decode_replica_computes_a_short_uncached_part() -> None:
    decodes = _views("d")
    decodes[2] = _holding(decodes[2], 4090)
    prefills = [replace(view, queue_s=1.0) for view in _views("p")]
    best = make_policy("cost").options(_DEMAND, prefills, decodes)[0]
    assert (best.prefill, best.decode) == (None, "d-2")


def test_equal_costs_go_to_fewer_streams() -> None:
    prefills = [replace(view, num_streams=2 - i) for i, view in enumerate(_views("p"))]
    assert make_policy("cost").options(_DEMAND, prefills, _views("d"))[0].prefill == "p-2"


def test_a_replica_without_blocks_is_avoided() -> None:
    decodes = [replace(view, available_blocks=0 if i else 1000, num_streams=3) for i, view in enumerate(_views("d"))]
    assert make_policy("cost").options(_DEMAND, _views("p"), decodes)[0].decode == "d-0"


def test_drafts_reduce_the_predicted_number_of_steps() -> None:
    """With drafts, steps are slower, but an answer needs fewer of them."""
    slow = replace(_IDLE.timing, base_s=0.007)
    drafting = replace(_IDLE, replica="d-1", timing=slow, tokens_per_row=2.0, drafted_per_row=3.0)
    for decodes, best in (
        ([replace(_IDLE, replica="d-0"), drafting], "d-1"),
        ([replace(_IDLE, replica="d-0"), replace(drafting, tokens_per_row=1.0)], "d-0"),
        ([replace(drafting, replica="d-0", drafted_per_row=30.0), drafting], "d-1"),
    ):
        assert make_policy("cost").options(_DEMAND, _views("p"), decodes)[0].decode == best


def test_blocks_behind_the_last_checkpoint_are_not_shipped_again() -> None:
    """They cannot be computed upon, but a prefill replica need not ship them."""
    states = replace(_DEMAND, cache=CacheShape(block_size=64, token_bytes=1000, state_bytes=50_000))
    near, far = (replace(view, held_tokens=held) for view, held in zip(_views("d", 2), (4032, 0), strict=True))
    options = make_policy("cost").options(states, _views("p", 1), [far, near])
    assert options[0].decode == near.replica and all(option.prefill for option in options)
    assert [round(option.transfer_s * 1e9) for option in options] == [64 * 1000 + 50_000, 4096 * 1000 + 50_000]


def test_only_windows_of_a_prefix_are_shipped() -> None:
    windows = CacheShape(block_size=64, token_bytes=1000, window_token_bytes=900, window=512)
    demand, holder = replace(_DEMAND, cache=windows), _holding(_IDLE, 4032)
    prefills = [replace(_IDLE, replica="p-0"), replace(holder, replica="p-1", queue_s=5.0)]
    best = make_policy("cost", prefix_fetches=True).options(demand, prefills, _views("d", 1))[0]
    # From the first blocks that the queries at 4096 and 4032 see.
    assert round(best.transfer_s * 1e9) == 4096 * 100 + (4096 - 3584) * 900
    assert (best.fetch_from, round((best.fetch_s - 0.002) * 1e9)) == ("p-1", 4032 * 100 + (4032 - 3520) * 900)
