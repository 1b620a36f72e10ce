"""Contract of the boards, alerts and Prometheus configuration in deploy/monitoring."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.rpc.worker_pb2 import Status
from docs.generate.metrics import name_of
from router.telemetry.metrics import Metrics
from worker.metrics import metrics_registry

_FILES = Path(__file__).parents[2] / "deploy" / "monitoring"
_BOARDS = sorted(_FILES.glob("*.json"))
_NAMES = re.compile(r"([a-z_]+)\{job")
_FAMILIES = [*Metrics().registry.collect(), *metrics_registry(Status, {}).collect()]
_KNOWN = {name_of(one) + ("_bucket" if one.type == "histogram" else "") for one in _FAMILIES}


def _panels(path: Path) -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = json.loads(path.read_text())["panels"]
    return panels


def _rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((_FILES / "alerts.yml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def test_boards_show_every_metric_and_no_other() -> None:
    queries = [one["expr"] for path in _BOARDS for panel in _panels(path) for one in panel.get("targets", ())]
    assert {name for query in queries for name in _NAMES.findall(query)} == _KNOWN | {"up"}


def test_alerts_name_metrics_that_exist() -> None:
    names = [_NAMES.findall(rule["expr"]) for rule in _rules()]
    assert all(names) and {name for some in names for name in some} <= _KNOWN | {"up"}


def test_every_name_that_begins_with_the_prefix_exists() -> None:
    """In queries of any form, and in the text of alerts."""
    names = {name for path in _FILES.iterdir() for name in re.findall(r"\bxpyd_[a-z_]+", path.read_text())}
    histograms = {name.removesuffix("_bucket") for name in _KNOWN if name.endswith("_bucket")}
    assert names and names <= _KNOWN | histograms


def test_no_query_removes_duplicates() -> None:
    assert not [path.name for path in _FILES.iterdir() if "max by" in path.read_text()]


def test_prometheus_discovers_targets_through_a_router() -> None:
    tree = yaml.safe_load((_FILES / "prometheus.yml").read_text())
    [job] = tree["scrape_configs"]
    assert job["http_sd_configs"][0]["url"].endswith("/targets") and job["honor_labels"]
    assert tree["rule_files"] == ["alerts.yml"]


@pytest.mark.parametrize("path", _BOARDS, ids=lambda path: path.stem)
def test_panels_do_not_overlap(path: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in _panels(path):
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells
