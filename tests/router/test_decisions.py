"""A router remembers why; by the client's id."""

from __future__ import annotations

from router.decisions import Decisions
from router.policy import Option


def test_every_attempt_of_every_prompt_is_told() -> None:
    decisions = Decisions()
    first, second = Option(prefill="p-0", decode="d-0", compute_s=1.0), Option(prefill=None, decode="d-1", queue_s=2.0)
    decisions.add("chat-1-0a1b2c3d", [first, second])
    decisions.add("chat-1-0a1b2c3d", [second])
    decisions.add("chat-1-ffffffff", [first])
    decisions.add("chat-10-0a1b2c3d", [first])
    told = decisions.explain("chat-1")
    assert sorted(told) == ["chat-1-0a1b2c3d", "chat-1-ffffffff"]
    assert [[option["decode"] for option in attempt] for attempt in told["chat-1-0a1b2c3d"]] == [
        ["d-0", "d-1"],
        ["d-1"],
    ]
    assert told["chat-1-ffffffff"][0][0]["cost_s"] == 1.0
    assert decisions.explain("another") == {}


def test_only_the_last_are_remembered() -> None:
    decisions = Decisions()
    for number in range(1500):
        decisions.add(f"r{number}", [Option(prefill=None, decode="d")])
    assert decisions.explain("r0") == {} and decisions.explain("r1499")
