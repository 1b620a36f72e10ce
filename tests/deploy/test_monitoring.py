"""Dashboards and alerts in deploy/monitoring use only metrics that a router exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.telemetry.metrics import declared

_FILES = Path(__file__).parents[2] / "deploy" / "monitoring"
_BOARDS = sorted(_FILES.glob("*.json"))
_NAMES = re.compile(r"([a-z_]+)\{job")
_KNOWN = {metric.name + ("_bucket" if metric.kind == "histogram" else "") for metric in declared()} | {"up"}


def _panels(path: Path) -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = json.loads(path.read_text())["panels"]
    return panels


@pytest.mark.parametrize("path", _BOARDS, ids=lambda path: path.stem)
def test_panels_use_existing_metrics(path: Path) -> None:
    queries = [target["expr"] for panel in _panels(path) for target in panel.get("targets", ())]
    names = {name for query in queries for name in _NAMES.findall(query)}
    assert queries and names <= _KNOWN


def test_alerts_use_existing_metrics() -> None:
    [group] = yaml.safe_load((_FILES / "alerts.yml").read_text())["groups"]
    names = [_NAMES.findall(rule["expr"]) for rule in group["rules"]]
    assert all(names) and {name for some in names for name in some} <= _KNOWN


@pytest.mark.parametrize("path", _BOARDS, ids=lambda path: path.stem)
def test_panels_do_not_overlap(path: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in _panels(path):
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells
