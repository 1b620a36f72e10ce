"""Output of `cluster autoscale status` and `explain` for reports of the controller."""

from __future__ import annotations

from typing import Any

import pytest

import cluster.cli.planning.autoscale
from cluster.cli.app import run
from planner.autoscaler.pool_sizes import PoolSizes
from planner.autoscaler.scaling_decision import ScalingDecision

_RULES = {"slo_ttft_ms": 2000.0, "slo_itl_ms": 50.0, "attainment": 0.95, "interval_s": 30.0, "dry_run": False}


def _decision(number: int, *, after: PoolSizes) -> dict[str, Any]:
    before = PoolSizes(1, 1)
    return ScalingDecision(
        number=number, time_s=1e9 + number, before=before, after=after, mode="simulator", reason=f"reason {number}"
    ).as_dict()


def _report(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    report = {"rules": _RULES, "sizes": [1, 1], "history": "", "problem": "", "decisions": []} | fields
    monkeypatch.setattr(cluster.cli.planning.autoscale, "ask_deployed", lambda name, method: report)


def test_last_decision_is_shown_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stays, grows = PoolSizes(1, 1), PoolSizes(2, 1)
    _report(monkeypatch, decisions=[_decision(1, after=grows), _decision(2, after=stays), _decision(3, after=grows)])
    assert run(["autoscale", "status"]) == 0
    reasons = [line.rpartition("  ")[2] for line in capsys.readouterr().out.splitlines()[2:]]
    assert reasons == ["reason 1", "reason 3"]


@pytest.mark.parametrize(
    ("fields", "arguments", "error"),
    [
        ({"rules": None}, [], "no decision yet: autoscaling is off"),
        ({}, [], "no decision yet: one is made every 30 s; retry later"),
        ({"problem": "no router tells"}, [], "no decision yet: no router tells"),
        ({"decisions": [_decision(3, after=PoolSizes(1, 1))]}, ["7"], "no decision 7: available: 3 to 3"),
    ],
)
def test_missing_decision_is_explained(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fields: dict[str, Any],
    arguments: list[str],
    error: str,
) -> None:
    _report(monkeypatch, **fields)
    assert run(["autoscale", "explain", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"cluster: {error}")
