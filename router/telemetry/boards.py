"""Grafana's boards: every metric that is declared is on one of them, a new one by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from router.telemetry.metrics import Declared, declared
from router.telemetry.panels import ACCEPTED, KV_USE, REPLICAS, REUSE, ROUTERS, Panel

Row = tuple[str, Sequence[str | Panel]]  # its title; metrics by name, and what no single one says

_SERVICE: Sequence[Row] = (
    (
        "Requests",
        ("requests_total", "request_time_seconds", "queue_time_seconds", "requests_waiting", "prefill_answers_total"),
    ),
    ("Latency", ("time_to_first_token_seconds", "inter_token_latency_seconds")),
    ("Tokens", ("generated_tokens_total", "prompt_tokens_total", "cached_prompt_tokens_total", REUSE)),
    ("Who serves", (ROUTERS, REPLICAS, "tenants_at_share", "member_records_refused_total")),
    ("Routers", ("background_task_deaths_total",)),
)
_REPLICAS: Sequence[Row] = (
    ("Load", ("sequences_running", "sequences_waiting", "queued_prompt_tokens", "context_tokens")),
    ("Work", ("replica_generated_tokens_total", "replica_prompt_tokens_total", "prefix_hit_tokens_total",
              "replica_forced_tokens_total", "preemptions_total", "cancelled_sequences_total")),
    ("KV pool", (KV_USE, "kv_blocks", "kv_blocks_free", "kv_blocks_cached")),
    ("KV on its way", ("kv_transfer_bytes_total", "link_bytes_per_second", "kv_transfers_total",
                       "kv_transfer_seconds_total", "kv_transfer_failures_total")),
    ("Prefixes fetched", ("prefix_pulls_total", "pulled_tokens_total", "prefix_pull_seconds_total",
                          "prefix_pull_failures_total")),
    ("Lower tiers", ("kv_blocks_in_memory", "kv_blocks_on_disk", "kv_host_hit_tokens_total", "kv_disk_hit_tokens_total",
                     "kv_host_saved_bytes_total", "kv_disk_saved_bytes_total", "kv_host_bytes_per_second",
                     "kv_disk_bytes_per_second", "kv_tier_losses_total")),
    ("Steps", ("step_base_seconds", "step_token_seconds", "step_pair_seconds", "step_context_seconds",
               "replica_draining")),
    ("Drafts", ("speculation_drafted_tokens_total", "speculation_accepted_tokens_total", ACCEPTED,
                "step_tokens_per_row", "step_drafted_per_row", "corpus_tokens")),
)  # fmt: skip
_OTHERS = "Others"
_WIDTH, _HEIGHT, _ACROSS = 12, 8, 2  # of a panel; Grafana's grid is 24 wide


def boards() -> dict[str, dict[str, Any]]:
    """By file name, as Grafana imports them."""
    known = {metric.name: metric for metric in declared()}
    drawn = {name for _, parts in (*_SERVICE, *_REPLICAS) for name in parts if isinstance(name, str)}
    others = [name for name in known if name not in drawn]
    rows = (*_REPLICAS, (_OTHERS, others)) if others else _REPLICAS
    return {
        "service.json": _board("xpyd-service", "xpyd: service", _SERVICE, known),
        "replicas.json": _board("xpyd-replicas", "xpyd: replicas", rows, known),
    }


def panels_of(board: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of each panel its title and each of its queries."""
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def _board(uid: str, title: str, rows: Sequence[Row], known: Mapping[str, Declared]) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for row, parts in rows:
        panels.append({"type": "row", "title": row, "collapsed": False, "panels": [], "gridPos": _place(top, 0, 24, 1)})
        top += 1
        for number, part in enumerate(parts):
            panel = part if isinstance(part, Panel) else Panel.of(known[part])
            left, down = number % _ACROSS * _WIDTH, number // _ACROSS * _HEIGHT
            panels.append(_drawn(panel, _place(top + down, left, _WIDTH, _HEIGHT)))
        top += -(-len(parts) // _ACROSS) * _HEIGHT
    for number, drawn in enumerate(panels, start=1):
        drawn["id"] = number
    return {
        "uid": uid,
        "title": title,
        "tags": ["xpyd"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_DATASOURCE, _JOB]},
        "panels": panels,
    }


_DATASOURCE = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
_JOB = {
    "name": "job",
    "label": "Deployment",
    "type": "query",
    "datasource": {"type": "prometheus", "uid": "${datasource}"},
    "query": {"query": "label_values(requests_waiting, job)", "refId": "job"},
    "includeAll": True,
    "multi": True,
    "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    "refresh": 2,
}


def _place(top: int, left: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


def _drawn(panel: Panel, place: Mapping[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    targets = [
        {"refId": chr(ord("A") + number), "datasource": source, "expr": expr, "legendFormat": legend}
        for number, (expr, legend) in enumerate(panel.queries)
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }
