"""`cluster trace`: timeline of a request and its critical path."""

from __future__ import annotations

import json
from typing import Any

from cluster.cli.deploy import AsJson, Name
from cluster.cli.routers import Admin, RequestId, remembered
from core.types.timeline import Span, critical_path, spans_of

# Width of the timeline in characters.
_WIDTH = 60
# Spans below this share of the total are left out of the critical path.
_SHOWN = 0.01


def trace(
    request_id: RequestId,
    name: Name = None,
    admin: Admin = None,
    as_json: AsJson = False,
) -> None:
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
    """Return the lines of one request's timeline. life: as in Life.as_dict."""
    spans, total_s = spans_of(life), float(life["seconds"])
    path = critical_path(spans)
    first_s, trace_id = float(life["first_token_s"]), life["trace_id"]
    head = f"request {id}: {life['outcome']} after {1e3 * total_s:.1f} ms"
    head += f", first token after {1e3 * first_s:.1f} ms" if first_s else ""
    lines = [head + (f", trace {trace_id}" if trace_id else "")]
    rows = [[span.state.value, span.replica or "router", *_numbers(span)] for span in spans]
    widths = [max(len(row[i]) for row in [["STATE", "WHERE", "AT ms", "FOR ms"], *rows]) for i in range(4)]
    lines.append(_row(["STATE", "WHERE", "AT ms", "FOR ms"], widths))
    for span, row in zip(spans, rows, strict=True):
        lines.append(f"{_row(row, widths)}  |{_bar(span, path, total_s)}|")
    shown = [_share(span, total_s) for span in path if span.end_s - span.start_s >= _SHOWN * total_s]
    lines.append("critical path: " + (" > ".join(shown) or "nothing yet"))
    lines += [f"retried elsewhere: {trouble}" for trouble in life["troubles"]]
    return lines


def _numbers(span: Span) -> list[str]:
    return [f"{1e3 * span.start_s:.1f}", f"{1e3 * (span.end_s - span.start_s):.1f}"]


def _row(cells: list[str], widths: list[int]) -> str:
    left = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
    return "  ".join([*left, *(cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True))])


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
