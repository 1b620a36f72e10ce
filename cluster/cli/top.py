"""`cluster top`: live view of a deployment in the terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.connection import ask_routers_of
from cluster.cli.console import columns
from cluster.cli.options import Admin, Name
from core.types.errors import ClusterError

if TYPE_CHECKING:
    from rich.console import RenderableType

_NUM_DECISIONS, _NUM_FLOWS = 8, 8
# Number of last seconds that are averaged.
_WINDOW_S = 10

View = dict[str, Any]


def top(
    name: Name = None,
    admin: Admin = None,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot as plain text.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one snapshot as JSON, one object per router.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Refresh interval in seconds.")] = 1.0,
) -> None:
    """Watch replicas, KV, latency and decisions live; Ctrl-C ends it."""
    if as_json:
        print(json.dumps(_views(name, admin), indent=1))
    elif once or not sys.stdout.isatty():
        print(plain(_views(name, admin)))
    else:
        _watch(name, admin, interval)


def _views(name: str | None, admin: str | None) -> list[View]:
    answers = ask_routers_of(name, admin, "/debug/view")
    views = [view for answer in answers if answer.status == 200 and (view := answer.json())]
    if not views:
        raise ClusterError("the routers' version does not support `cluster top`")
    return views


def _watch(name: str | None, admin: str | None, interval_s: float) -> None:
    from rich.live import Live

    with Live(_drawn(_views(name, admin)), screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(_drawn(_views(name, admin)), refresh=True)
                time.sleep(interval_s)
        except KeyboardInterrupt:
            return


def plain(views: Sequence[View]) -> str:
    """Format the views as plain text, for scripts and pagers."""
    parts = [_head(views), columns([_REPLICA_HEADS, *_replica_rows(views)])]
    for title, heads, rows in _tables(views):
        if rows:
            parts.append(f"\n{title}\n" + columns([heads, *rows]))
    return "\n".join(parts)


def _drawn(views: Sequence[View]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
        made = Table(title=title or None, title_justify="left", expand=True, box=None, pad_edge=False)
        for head in heads:
            made.add_column(head, no_wrap=True, overflow="ellipsis")
        for row in rows:
            made.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
        return made

    shown = [(title, heads, rows) for title, heads, rows in _tables(views) if rows]
    return Group(
        Text(_head(views), style="bold"),
        table("", _REPLICA_HEADS, _replica_rows(views)),
        *(table(*one) for one in shown),
    )


_STYLES = {"lost": "bold red", "draining": "yellow", "joining": "yellow", "ready": "green"}
_REPLICA_HEADS = ["REPLICA", "STATE", "RUN", "WAIT", "LOAD", "KV USED", "CACHED", "REUSE", "TOKENS/S", "LINK MB/S"]


def _head(views: Sequence[View]) -> str:
    first, replicas = views[0], _replicas(views)
    counts = {role: sum(one["role"] == role for one in replicas) for role in ("prefill", "decode")}
    recent = [point for view in views for point in view["history"][-_WINDOW_S:]]
    seconds = max(1, min(_WINDOW_S, len(recent) // len(views)))
    tokens = sum(point["tokens_per_s"] for point in recent) / seconds
    requests = sum(point["requests_per_s"] for point in recent) / seconds
    waiting = sum(view["history"][-1]["waiting"] for view in views if view["history"])
    ttft, itl = (_worst(recent, key) for key in ("ttft_s", "itl_s"))
    routers = f"{len(views)} router{'s' if len(views) > 1 else ''}"
    return (
        f"{_text(first['deployment'])}: {routers}, {counts['prefill']}P{counts['decode']}D, "
        f"{tokens:.0f} tokens/s, {requests:.1f} requests/s, {waiting} waiting, TTFT {ttft}, ITL {itl}"
    )


def _worst(points: Sequence[Mapping[str, Any]], key: str) -> str:
    """Return the mean of the P50 values of each second, and the highest P99."""
    values = [point[key] for point in points if point[key]]
    if not values:
        return "-"
    middle = sum(p50 for p50, _ in values) / len(values)
    return f"{1e3 * middle:.1f} ms (P99 {1e3 * max(p99 for _, p99 in values):.0f})"


def _replicas(views: Sequence[View]) -> list[dict[str, Any]]:
    """Merge the replicas of all routers; a replica that one router reports as lost is lost."""
    found: dict[str, dict[str, Any]] = {}
    for view in views:
        for replica in view["replicas"]:
            if replica["id"] not in found or replica["state"] != "ready":
                found[replica["id"]] = replica
    return sorted(found.values(), key=lambda one: (one["role"] != "prefill", len(one["id"]), one["id"]))


def _replica_rows(views: Sequence[View]) -> list[list[str]]:
    rows = []
    for one in _replicas(views):
        blocks = max(1, one["blocks"])
        used = 1 - (one["blocks_free"] + one["blocks_cached"]) / blocks
        tokens = one["computed_per_s"] if one["role"] == "prefill" else one["generated_per_s"]
        shares = [one["running"] / max(1, one["max_running"]), used, one["blocks_cached"] / blocks, one["reused"]]
        numbers = ["-" if share is None else f"{share:.0%}" for share in shares]
        rate = [f"{tokens:.0f}", f"{one['link_bytes_per_s'] / 1e6:.1f}"]
        rows.append([one["id"], one["state"], str(one["running"]), str(one["waiting"]), *numbers, *rate])
    return rows


def _tables(views: Sequence[View]) -> list[tuple[str, list[str], list[list[str]]]]:
    flows: dict[tuple[str, str, str], float] = {}
    for view in views:
        for flow in view["flows"]:
            between = (flow["kind"], flow["source"], flow["target"])
            flows[between] = flows.get(between, 0.0) + flow["bytes_per_s"]
    most = sorted(flows.items(), key=lambda one: -one[1])[:_NUM_FLOWS]
    decisions = sorted((one for view in views for one in view["decisions"]), key=lambda one: float(one["age_s"]))
    autoscaler = [[_text(one["text"]), _text(one["reason"])] for one in views[0]["autoscaler"][:3]]
    return [
        ("KV on its way", ["WHAT", "FROM", "TO", "MB/S"], [[*between, f"{rate / 1e6:.2f}"] for between, rate in most]),
        ("last decisions", ["REQUEST", "TENANT", "PAIR", "PREDICTED", "OUTCOME", "TTFT", "ALL"],
         [_decision(one) for one in decisions[:_NUM_DECISIONS]]),
        ("autoscaler", ["DECISION", "REASON"], autoscaler),
    ]  # fmt: skip


def _decision(one: Mapping[str, Any]) -> list[str]:
    best = one["options"][0] if one["options"] else {}
    pair = f"{best.get('prefill') or '-'} {best.get('decode') or '-'}" if best else "-"
    predicted = "-"
    if best:
        predicted = f"{1e3 * best['cost_s']:.0f} ms" if best.get("is_learnt", True) else "not learnt yet"
    took = [f"{1e3 * one[key]:.0f} ms" if one[key] else "-" for key in ("first_token_s", "seconds")]
    return [_text(one["request"]), _text(one["tenant"]) or "-", pair, predicted, one["outcome"] or "-", *took]


def _text(word: str) -> str:
    """Replace unprintable characters of client text, which could be terminal control codes."""
    return "".join(letter if letter.isprintable() else "?" for letter in word)
