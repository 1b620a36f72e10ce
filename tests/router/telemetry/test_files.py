"""The boards and alerts are of the metrics that there are: all of them, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

from router.telemetry.boards import boards, panels_of
from router.telemetry.files import monitoring_files
from router.telemetry.metrics import declared
from router.telemetry.rules import ALERTS

_DEPLOY = Path(__file__).parents[3] / "deploy" / "monitoring"
_NAMES = re.compile(r"([a-z_]+)\{job")


def test_what_is_in_deploy_is_what_the_command_writes() -> None:
    files = monitoring_files()
    assert {path.name for path in _DEPLOY.iterdir()} - {"README.md"} == files.keys()
    for name, text in files.items():
        assert (_DEPLOY / name).read_text() == text, "run `cluster monitoring deploy/monitoring`"


def test_every_metric_is_drawn_and_nothing_is_drawn_that_is_none() -> None:
    known = {metric.name + ("_bucket" if metric.kind == "histogram" else "") for metric in declared()}
    drawn = {name for board in boards().values() for _, expr in panels_of(board) for name in _NAMES.findall(expr)}
    assert drawn == known | {"up"}
    looked_at = {name for alert in ALERTS for name in _NAMES.findall(alert.looked_at)}
    assert looked_at and looked_at <= known | {"up"}


def test_each_panel_has_a_row_and_a_title_of_its_own() -> None:
    panels = [panel for board in boards().values() for panel in board["panels"]]
    assert "Others" not in [panel["title"] for panel in panels], "give it a row in router/telemetry/boards.py"
    titles = [panel["title"] for panel in panels if panel["type"] != "row"]
    assert len(titles) == len(set(titles))


def test_what_two_routers_say_of_a_replica_counts_once() -> None:
    of_replicas = {metric.name for metric in declared() if metric.is_replicas}
    asked = [expr for board in boards().values() for _, expr in panels_of(board)]
    asked += [alert.looked_at for alert in ALERTS]
    for expr in asked:
        for name in of_replicas & set(_NAMES.findall(expr)):
            for before in expr.split(name + "{")[:-1]:
                assert re.search(r"max by \(replica, role[a-z, ]*\) \((rate\()?$", before), expr


def test_panels_do_not_overlap_and_ids_are_their_own() -> None:
    for board in boards().values():
        ids = [panel["id"] for panel in board["panels"]]
        assert len(ids) == len(set(ids))
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert not cells & taken and at["x"] + at["w"] <= 24
            taken |= cells


def test_routers_that_are_named_are_asked() -> None:
    text = monitoring_files(admin=["10.0.0.1:9100", "10.0.0.2:9100"])["prometheus.yml"]
    assert "url: http://10.0.0.1:9100/targets" in text and "url: http://10.0.0.2:9100/targets" in text
    assert json.dumps(["127"]) not in text
