"""Draft summary of `cluster explain`."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.cli import trace
from tests.cluster.cli.command import CommandInProcess


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
