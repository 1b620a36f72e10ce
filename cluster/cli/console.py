"""What commands print: results to stdout, progress to stderr; a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.live import Live

_BAR_WIDTH = 20


class ConsoleReporter:
    """Implements cluster.pool_watch.Reporter."""

    def __init__(self, live: Live | None) -> None:
        self._live = live
        self._seen: dict[str, str] = {}  # replica -> what was last said of it

    def say(self, line: str) -> None:
        if self._live:
            self._live.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def show(self, pools: dict[str, Any]) -> None:
        replicas = [replica for pool in pools.values() for replica in pool["replicas"]]
        failures = [failure for pool in pools.values() for failure in pool["failures"]]
        for failure in failures:
            if self._is_news(f"failure of {failure['replica']}", failure["text"]):
                self.say(failure["text"])
        if self._live:
            from rich.text import Text

            self._live.update(Text("\n".join(_live_line(replica) for replica in replicas)), refresh=True)
            return
        for replica in replicas:
            what = replica["state"] + (f" on {replica['node']}" if replica["node"] else "")
            if replica["state"] == "pending" and replica["stage"]:
                what += f": {replica['stage']}"
            if self._is_news(replica["id"], what):
                self.say(f"{replica['id']} {what}")

    def _is_news(self, subject: str, what: str) -> bool:
        if self._seen.get(subject) == what:
            return False
        self._seen[subject] = what
        return True


@contextmanager
def reporter() -> Iterator[ConsoleReporter]:
    """A reporter for as long as a command takes; the live table is gone afterwards."""
    if not sys.stderr.isatty():
        yield ConsoleReporter(None)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), transient=True, auto_refresh=False) as live:
        yield ConsoleReporter(live)


def columns(rows: list[list[str]]) -> str:
    """Rows of equal length as aligned text; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _live_line(replica: dict[str, Any]) -> str:
    bar = ""
    if replica["state"] == "loading":
        filled = round(_BAR_WIDTH * replica["fraction"])
        bar = "█" * filled + "░" * (_BAR_WIDTH - filled)
    return f"{replica['id']:<14} {replica['state']:<9} {bar} {replica['stage']}"
