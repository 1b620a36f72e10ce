"""Output of `cluster autoscale status` and `explain` for reports of the controller."""

from __future__ import annotations

from typing import Any

import pytest

from planner.autoscaler.pool_sizes import PoolSizes
from planner.autoscaler.scaling_decision import ScalingDecision
from tests.cluster.cli.command import CommandInProcess
from tests.cluster.cli.conftest import Control

_RULES = {"slo_ttft_ms": 2000.0, "slo_itl_ms": 50.0, "attainment": 0.95, "interval_s": 30.0, "dry_run": False}
_REPORT = {"rules": _RULES, "sizes": [1, 1], "history": "", "problem": "", "decisions": []}


def _decision(number: int, *, after: PoolSizes) -> dict[str, Any]:
    sizes = {"before": PoolSizes(1, 1), "after": after}
    reason = f"reason {number}"
    return ScalingDecision(number=number, time_s=1e9 + number, mode="simulator", reason=reason, **sizes).as_dict()


def test_last_decision_is_shown_once(control: Control, cluster: CommandInProcess) -> None:
    stays, grows = PoolSizes(1, 1), PoolSizes(2, 1)
    decisions = [_decision(1, after=grows), _decision(2, after=stays), _decision(3, after=grows)]
    control(lambda method: _REPORT | {"decisions": decisions})
    status = cluster.run("autoscale", "status")
    reasons = [line.rpartition("  ")[2] for line in status.out.splitlines()[2:]]
    assert status.code == 0 and reasons == ["reason 1", "reason 3"]


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
    control: Control, cluster: CommandInProcess, fields: dict[str, Any], arguments: list[str], error: str
) -> None:
    control(lambda method: _REPORT | fields)
    explained = cluster.run("autoscale", "explain", *arguments)
    assert explained.code == 2 and explained.err.startswith(f"cluster: {error}")
