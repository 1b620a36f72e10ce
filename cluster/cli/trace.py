"""Two views of a request: `cluster trace`, its timeline and critical path; `cluster explain`, its routing decision."""

from __future__ import annotations

import json
from typing import Any

from cluster.cli.connection import remembered
from cluster.cli.console import columns
from cluster.cli.options import Admin, AsJson, Name, RequestId
from core.types.timeline import Span, critical_path, spans_of

# Width of the timeline in characters.
_WIDTH = 60
# Spans below this share of the total are left out of the critical path.
_SHOWN = 0.01
# Parts of the predicted cost of a pair of replicas.
_PARTS = ("wait_s", "queue_s", "fetch_s", "compute_s", "keep_s", "transfer_s", "stall_s", "decode_s", "cost_s")


def trace(request_id: RequestId, name: Name = None, admin: Admin = None, as_json: AsJson = False) -> None:
    """Draw the timeline of a request: queue, route, pull, compute, wire, wait, decode. `#` marks its critical path.

    A router remembers its last 1,000 requests, whether or not they are traced.
    """
    found = remembered(name, admin, "/debug/lives/", request_id)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for id, life in found.items():
        print("\n".join(picture(id, life)))


def picture(id: str, life: dict[str, Any]) -> list[str]:
    """Return the lines of one request's timeline. life: from Timeline.as_dict."""
    spans, total_s = spans_of(life), float(life["seconds"])
    path = critical_path(spans)
    first_s, trace_id = float(life["first_token_s"]), life["trace_id"]
    head = f"request {id}: {life['outcome']} after {1e3 * total_s:.1f} ms"
    head += f", first token after {1e3 * first_s:.1f} ms" if first_s else ""
    lines = [head + (f", trace {trace_id}" if trace_id else "")]
    rows = [["STATE", "WHERE", "AT ms", "FOR ms", ""]]
    for span in spans:
        numbers = [f"{1e3 * span.start_s:.1f}", f"{1e3 * (span.end_s - span.start_s):.1f}"]
        rows.append([span.state.value, span.replica or "router", *numbers, f"|{_bar(span, path, total_s)}|"])
    lines += columns(rows, right=(2, 3)).splitlines()
    shown = [_share(span, total_s) for span in path if span.end_s - span.start_s >= _SHOWN * total_s]
    lines.append("critical path: " + (" > ".join(shown) or "nothing yet"))
    lines += [f"retried elsewhere: {trouble}" for trouble in life["troubles"]]
    return lines


def _bar(span: Span, path: list[Span], total_s: float) -> str:
    """Draw `#` where the span is on the critical path, `-` elsewhere."""
    own = [one for one in path if (one.state, one.replica) == (span.state, span.replica)]

    def cell(number: int) -> str:
        at, until = (total_s * edge / _WIDTH for edge in (number, number + 1))
        if span.end_s <= at or span.start_s >= until:
            return " "
        start, end = max(at, span.start_s), min(until, span.end_s)
        return "#" if any(one.start_s < end and one.end_s > start for one in own) else "-"

    return "".join(map(cell, range(_WIDTH)))


def _share(span: Span, total_s: float) -> str:
    took_s = span.end_s - span.start_s
    where = f" {span.replica}" if span.replica else ""
    return f"{span.state.value}{where} {1e3 * took_s:.1f} ms ({took_s / total_s if total_s else 0:.0%})"


def explain(request_id: RequestId, name: Name = None, admin: Admin = None, as_json: AsJson = False) -> None:
    """Show the replica pairs that the router considered for a request, with the predicted cost of each; the chosen pair
    is first.

    A router remembers its last 1,000 requests.
    """
    requests = remembered(name, admin, "/debug/routes/", request_id)
    if as_json:
        print(json.dumps(requests, indent=1))
        return
    for id, attempts in requests.items():
        for number, attempt in enumerate(attempts, start=1):
            print(f"request {id}, attempt {number}: milliseconds, the first line was chosen")
            print(_options_table(attempt["options"]))
            print("state of the replicas, with the rates learned from their steps")
            print(_replicas_table(attempt["replicas"]))
            if drafts := attempt.get("drafts"):
                print(_drafts_line(drafts))


def _options_table(options: list[dict[str, Any]]) -> str:
    rows = [["PREFILL", "DECODE", "PULL FROM", *(part.removesuffix("_s").upper() for part in _PARTS)]]
    for option in options:
        names = [option["prefill"] or "-", option["decode"], option["fetch_from"] or "-"]
        rows.append([*names, *(f"{option.get(part, 0.0) * 1e3:.1f}" for part in _PARTS)])
    return columns(rows)


def _replicas_table(replicas: dict[str, dict[str, Any]]) -> str:
    rows = [
        ["REPLICA", "CACHED", "QUEUE ms", "STREAMS", "BLOCKS", "STEP ms", "TOKEN us", "PAIR ns", "CONTEXT ns", "MB/S"]
    ]
    for name, view in replicas.items():
        timing = view["timing"]
        rates = [timing["base_s"] * 1e3, timing["token_s"] * 1e6, timing["pair_s"] * 1e9, timing["context_s"] * 1e9]
        numbers = [view["cached_tokens"], round(view["queue_s"] * 1e3), view["num_streams"], view["available_blocks"]]
        learnt = [f"{rate:.3g}" for rate in rates] if view.get("is_learnt", True) else ["not learnt yet", "-", "-", "-"]
        rows.append([name, *map(str, numbers), *learnt, f"{view['link_bytes_per_s'] / 1e6:.3g}"])
    return columns(rows)


def _drafts_line(drafts: dict[str, float]) -> str:
    """Describe how much was drafted, and why not more."""
    steps, drafted, accepted = drafts["steps"], drafts["drafted"], drafts["accepted"]
    not_worth = steps - drafts["drafts"] - drafts["unguessed"]
    accepted_share = f", {accepted} of them accepted ({accepted / drafted:.0%})" if drafted else ""
    floor = drafts["floors"] / steps
    needed = (
        f"drafting pays if a token is accepted with probability {floor:.2f} or more"
        if floor < 1
        else "drafting would not pay even if every token were accepted"
    )
    return (
        f"drafts: {drafts['drafted']} tokens{accepted_share}, in {drafts['drafts']} of {steps} steps; no draft found in"
        f" {drafts['unguessed']}, not worthwhile or no room in {not_worth}; with the other rows and token costs of its"
        f" replica, {needed}"
    )
