"""Log of routing decisions, by the client's request id."""

from __future__ import annotations

from dataclasses import replace

from core.types.request import DraftTally
from core.types.step_timing import StepTiming
from core.types.timeline import Timeline
from router.routing.decisions import Decisions
from router.routing.policy import CandidateReplica, Option


def _view(replica: str) -> CandidateReplica:
    return CandidateReplica(
        replica=replica,
        cached_tokens=0,
        stored_tokens=0,
        queue_s=0.0,
        num_streams=0,
        num_blocks=10,
        available_blocks=10,
        timing=StepTiming(base_s=0.01, token_s=1e-4),
        max_batch_tokens=512,
        link_bytes_per_s=1e9,
    )


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
    assert list(known) == ["p-0", "d-0", "d-1"] and known["p-0"]["timing"]["base_s"] == 0.01
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
