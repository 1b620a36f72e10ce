"""Conformance suite for all policies, the predictions of the cost policy, and the log of decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from core.model.kv_memory import CacheShape
from core.types.request import DraftTally
from core.types.step_timing import StepTiming
from core.types.timeline import Timeline
from router.routing.candidates import CandidateReplica, Option, ReplicaLoad, RoutingRequest, UsualRates
from router.routing.chooser import cheapest, decode_wait_s
from router.routing.decisions import Decisions
from router.routing.policies import POLICIES, make_policy
from tests.support.members import make_member

_DEMAND = RoutingRequest(num_tokens=4096, cache=CacheShape(block_size=64, token_bytes=1000), max_local_tokens=16)
_IDLE = CandidateReplica(
    replica="", cached_tokens=0, stored_tokens=0, queue_s=0.0, num_streams=0, num_blocks=1000, available_blocks=1000,
    timing=StepTiming(base_s=0.005, token_s=1e-4, pair_s=1e-9, context_s=1e-8), max_batch_tokens=2048,
    link_bytes_per_s=1e9,
)  # fmt: skip


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


def _with(views: list[CandidateReplica], at: int, **changes: Any) -> list[CandidateReplica]:
    return [replace(view, **changes) if place == at else view for place, view in enumerate(views)]


_P, _D = _views("p"), _views("d")
_HOLDS_ALL = {"cached_tokens": 4090, "stored_tokens": 4090}
_BEST: dict[str, tuple[tuple[str, ...], list[CandidateReplica], list[CandidateReplica], dict[str, Any]]] = {
    "a long queue is avoided": (
        ("cost", "prefix", "least_loaded"),
        [replace(view, queue_s=100.0 if at < 2 else 0.0) for at, view in enumerate(_P)], _D, {"prefill": "p-2"},
    ),
    "the holder of the prefix is preferred": (
        ("cost", "prefix"), _with(_P, 1, cached_tokens=2048, stored_tokens=2048), _D, {"prefill": "p-1"},
    ),
    "an uneven load counts more than the prefix": (
        ("prefix",), [], [replace(_D[0], **_HOLDS_ALL, num_streams=100), _D[1]], {"decode": "d-1"},
    ),
    "a lower tier is read rather than computed": (
        ("cost",), _with(_P[:1], 0, stored_tokens=4032, restore_bytes_per_s=1e10), _D,
        {"fetch_from": "p-0", "fetch_tokens": 4032},
    ),
    "a decode replica computes a short uncached part": (
        ("cost",), [replace(view, queue_s=1.0) for view in _P], _with(_D, 2, **_HOLDS_ALL),
        {"prefill": None, "decode": "d-2"},
    ),
    "equal costs go to fewer streams": (
        ("cost",), [replace(view, num_streams=2 - at) for at, view in enumerate(_P)], _D, {"prefill": "p-2"},
    ),
    "a replica without blocks is avoided": (
        ("cost",), _P, [replace(view, available_blocks=0 if at else 1000, num_streams=3) for at, view in enumerate(_D)],
        {"decode": "d-0"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", _BEST)
def test_best_pair(case: str) -> None:
    policies, prefills, decodes, expected = _BEST[case]
    for name in policies:
        best = make_policy(name).options(_DEMAND, prefills, decodes)[0]
        assert {field: getattr(best, field) for field in expected} == expected, name


def test_round_robin_visits_every_replica() -> None:
    policy = make_policy("round_robin")
    chosen = [policy.options(_DEMAND, [], _views("d"))[0].decode for _ in range(6)]
    assert sorted(chosen[:3]) == ["d-0", "d-1", "d-2"] and chosen[3:] == chosen[:3]


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


def _full(num_streams: int) -> CandidateReplica:
    timing = StepTiming(base_s=0.01, token_s=0.001)
    return replace(_IDLE, num_streams=num_streams, available_blocks=0, timing=timing)


def _wait_s(*views: CandidateReplica, num_ends: int = 1) -> float:
    return decode_wait_s(views, num_tokens=100, answer_tokens=50, num_ends=num_ends)


def test_wait_is_predicted_from_the_rate_of_ending_answers() -> None:
    """Ten streams of fifty 20 ms steps: one ends every 0.1 s."""
    assert abs(_wait_s(_full(10)) - 0.1) < 1e-9
    assert abs(_wait_s(_full(10), num_ends=7) - 0.7) < 1e-9
    assert abs(_wait_s(_full(10), _full(10)) - 0.05) < 1e-9


def test_wait_without_ending_answers_is_an_hour() -> None:
    assert _wait_s() == _wait_s(_full(0)) == 3600.0


def test_at_equal_cost_the_pair_wins_and_options_are_not_modified() -> None:
    alone, pair = Option(prefill=None, decode="p", compute_s=1.0), Option(prefill="p", decode="d", compute_s=0.5)
    assert [option.decode for option in cheapest([alone], [pair], wait_s=0.5)] == ["d", "p"]
    assert [option.decode for option in cheapest([alone], [pair], wait_s=0.6)] == ["p", "d"]
    assert pair.wait_s == 0.0


_LOAD = ReplicaLoad(
    member=make_member(), available_blocks=100, promised_blocks=0, promised_streams=0, num_streams=0,
    num_reported_streams=0, num_waiting=0, queued_tokens=0, prefill_tokens_per_s=0.0, decode_step_s=0.0,
    link_bytes_per_s=0.0, host_bytes_per_s=0.0, disk_bytes_per_s=0.0, timing=None,
)  # fmt: skip


def test_a_measured_draft_rate_of_zero_counts_in_the_mean() -> None:
    drafting = replace(_LOAD, tokens_per_row=3.0, drafted_per_row=4.0)
    without = replace(_LOAD, tokens_per_row=1.0, drafted_per_row=0.0)
    usual = UsualRates.of([drafting, without, _LOAD])
    assert (usual.tokens_per_row, usual.drafted_per_row) == (pytest.approx(2.0), pytest.approx(2.0))
    unknown = UsualRates.of([_LOAD])
    assert (unknown.tokens_per_row, unknown.drafted_per_row) == (1.0, 0.0)


def _view(replica: str) -> CandidateReplica:
    return replace(_IDLE, replica=replica)


def test_explain_returns_every_attempt_of_every_prompt() -> None:
    decisions = Decisions()
    first, second = Option(prefill="p-0", decode="d-0", compute_s=1.0), Option(prefill=None, decode="d-1", queue_s=2.0)
    decisions.add("chat-1-0a1b2c3d", [first, second], [_view("p-0"), _view("d-0"), _view("d-1"), _view("d-2")])
    decisions.add("chat-1-0a1b2c3d", [second], [])
    decisions.add("chat-1-ffffffff", [first], [])
    decisions.add("chat-10-0a1b2c3d", [first], [])
    explained = decisions.explain("chat-1")
    assert sorted(explained) == ["chat-1-0a1b2c3d", "chat-1-ffffffff"]
    chosen = [[option["decode"] for option in attempt["options"]] for attempt in explained["chat-1-0a1b2c3d"]]
    assert chosen == [["d-0", "d-1"], ["d-1"]]
    known = explained["chat-1-0a1b2c3d"][0]["replicas"]
    assert list(known) == ["p-0", "d-0", "d-1"] and known["p-0"]["timing"]["base_s"] == 0.005
    assert explained["chat-1-ffffffff"][0]["options"][0]["cost_s"] == 1.0
    decisions.add("fresh", [first, second], [_view("p-0"), replace(_view("d-0"), is_learnt=False), _view("d-1")])
    assert [option["is_learnt"] for option in decisions.last(1)[0]["options"]] == [False, True]
    assert decisions.explain("another") == {}


def test_old_decisions_are_dropped() -> None:
    decisions = Decisions()
    for number in range(1500):
        decisions.add(f"r{number}", [Option(prefill=None, decode="d")], [])
    assert decisions.explain("r0") == {} and decisions.explain("r1499")


def test_drafts_are_listed_with_the_last_attempt() -> None:
    decisions, drafts = Decisions(), DraftTally()
    decisions.live("r", Timeline(), drafts=drafts)
    decisions.add("r", [Option(prefill=None, decode="d")], [])
    decisions.add("r", [Option(prefill=None, decode="d")], [])
    assert not any("drafts" in attempt for attempt in decisions.explain("r")["r"]), "no replica drafts"
    drafts.add(DraftTally(steps=3, drafts=1, drafted=4, accepted=3, floors=0.5))
    first, last = decisions.explain("r")["r"]
    assert "drafts" not in first and (last["drafts"]["drafted"], last["drafts"]["accepted"]) == (4, 3)
