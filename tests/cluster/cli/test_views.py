"""Output of `cluster top` and `cluster explain` for the views of several routers."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.cli import trace
from cluster.cli.top import plain
from tests.cluster.cli.command import CommandInProcess


def _view(router: str, *, state: str = "ready", request: str = "r-1") -> dict[str, Any]:
    replica = {
        "id": "decode-1", "role": "decode", "state": state, "running": 3, "waiting": 1, "max_running": 4, "blocks": 10,
        "blocks_free": 1, "blocks_cached": 2, "computed_per_s": 0.0, "generated_per_s": 50.0, "reused": 0.25,
        "link_bytes_per_s": 2e6,
    }  # fmt: skip
    point = {"tokens_per_s": 50.0, "requests_per_s": 2.0, "ttft_s": [0.1, 0.3], "itl_s": None, "waiting": 2}
    option = {"prefill": "prefill-0", "decode": "decode-1", "cost_s": 0.2}
    decision = {"request": request, "tenant": "acme", "age_s": 1.0, "attempts": 1, "options": [option],
                "outcome": "completed", "seconds": 1.5, "first_token_s": 0.1}  # fmt: skip
    flow = {"kind": "handoff", "source": "prefill-0", "target": "decode-1", "bytes_per_s": 1e6}
    return {"deployment": "d", "router": router, "replicas": [replica], "flows": [flow], "history": [point] * 4,
            "decisions": [decision], "events": [], "autoscaler": []}  # fmt: skip


def test_router_totals_are_summed_and_replicas_are_not() -> None:
    lines = plain([_view("a"), _view("b")]).splitlines()
    assert lines[0] == "d: 2 routers, 0P1D, 100 tokens/s, 4.0 requests/s, 4 waiting, TTFT 100.0 ms (P99 300), ITL -"
    rows = [line.split() for line in lines if line.startswith("decode-1")]
    assert rows == [["decode-1", "ready", "3", "1", "75%", "70%", "20%", "25%", "50", "2.0"]]
    (flow,) = (line.split() for line in lines if line.startswith("handoff"))
    assert flow == ["handoff", "prefill-0", "decode-1", "2.00"]


def test_prediction_of_a_fresh_replica_is_not_shown() -> None:
    view = _view("a")
    assert "200 ms" in plain([view])
    view["decisions"][0]["options"][0]["is_learnt"] = False
    assert "not learnt yet" in plain([view]) and "200 ms" not in plain([view])


def test_replica_lost_by_one_router_is_lost() -> None:
    assert "lost" in plain([_view("a"), _view("b", state="lost")])
    assert "lost" in plain([_view("a", state="lost"), _view("b")])


def test_client_text_is_stripped_of_control_codes() -> None:
    text = plain([_view("a", request="\x1b]0;owned\x07r")])
    assert "\x1b" not in text and "\x07" not in text and "?]0;owned?r" in text


@pytest.mark.parametrize(
    ("floors", "ending"),
    [
        (20.0, "drafting pays if a token is accepted with probability 0.50 or more\n"),
        (46.4, "drafting would not pay even if every token were accepted\n"),
    ],
)
def test_required_acceptance_rate_is_shown(
    floors: float, ending: str, monkeypatch: pytest.MonkeyPatch, cluster: CommandInProcess
) -> None:
    tally = {"steps": 40, "drafts": 6, "unguessed": 5, "drafted": 32, "accepted": 14, "floors": floors}
    attempts: list[dict[str, Any]] = [{"options": [], "replicas": {}, "drafts": tally}]
    monkeypatch.setattr(trace, "remembered", lambda *_: {"r": attempts})
    out = cluster.run("explain", "r").out
    assert "drafts: 32 tokens, 14 of them accepted (44%), in 6 of 40 steps; no draft found in 5" in out
    assert "not worthwhile or no room in 29" in out
    assert out.endswith(ending)
