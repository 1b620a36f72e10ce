"""The files for who watches: boards for Grafana, alerts and a configuration for Prometheus."""

from __future__ import annotations

import json
from typing import Any

import yaml

from router.telemetry.boards import boards
from router.telemetry.rules import JOB, rules

TARGETS = "/targets"  # of a router's admin listener: where all routers answer Prometheus
RULES = "alerts.yml"
ADMIN = "127.0.0.1:9100"


def monitoring_files(*, admin: list[str] | None = None) -> dict[str, str]:
    """Their text by name. admin: HOST:PORT at which routers answer operators, one or more of them, in files that are
    not for everybody."""
    made = "# Written by `cluster monitoring`; limits are a beginning, put your own in.\n"
    files = {name: json.dumps(board, indent=1) + "\n" for name, board in boards().items()}
    files[RULES] = made + _yaml(rules())
    files["prometheus.yml"] = made + _yaml(_prometheus(admin or [ADMIN]))
    return files


def _prometheus(admin: list[str]) -> dict[str, Any]:
    """Each router is a target of its own, so that it is seen when one is away; any of them tells of all."""
    return {
        "global": {"scrape_interval": "5s", "evaluation_interval": "15s"},
        "rule_files": [RULES],
        "scrape_configs": [
            {
                "job_name": JOB,
                "http_sd_configs": [
                    {"url": f"http://{address}{TARGETS}", "refresh_interval": "10s"} for address in admin
                ],
            }
        ],
    }


def _yaml(tree: dict[str, Any]) -> str:
    return str(yaml.safe_dump(tree, sort_keys=False, width=120, allow_unicode=True))
