"""Console output: results to stdout, progress to stderr; a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.live import Live
    from rich.progress import Progress

    from cluster.control.replica import Pools, ReplicaReport

_BAR_WIDTH = 20


class ConsoleReporter:
    """Reporter on the console. Implements cluster.control.replica.Reporter."""

    def __init__(self, live: Live | None, *, is_new: bool) -> None:
        self._live = live
        # Last line printed per subject; None: the first report is not printed.
        self._printed: dict[str, str] | None = {} if is_new else None

    def say(self, line: str) -> None:
        if self._live:
            self._live.console.print(line, highlight=False, markup=False)
        else:
            say(line)

    def show(self, pools: Pools) -> None:
        replicas = [replica for pool in pools.values() for replica in pool["replicas"]]
        now = {
            failure["replica"] + " failed": failure["text"] for pool in pools.values() for failure in pool["failures"]
        }
        if self._live:
            from rich.text import Text

            self._live.update(Text("\n".join(_live_line(replica) for replica in replicas)), refresh=True)
        else:
            now |= {replica["id"]: _plain_line(replica) for replica in replicas}
        if self._printed is not None:
            self._print_changes(self._printed, now)
        self._printed = now

    def _print_changes(self, before: dict[str, str], now: dict[str, str]) -> None:
        for subject, line in now.items():
            if before.get(subject) != line:
                self.say(line)
        for subject in before:
            if subject not in now and f"{subject} failed" not in now:
                self.say(f"{subject} has left")


@contextmanager
def reporter(*, is_new: bool) -> Iterator[ConsoleReporter]:
    """Yield a reporter for the duration of a command. The live table disappears afterwards.

    is_new: this command starts the deployment; otherwise the state before the command is not printed.
    """
    if not sys.stderr.isatty():
        yield ConsoleReporter(None, is_new=is_new)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), transient=True, auto_refresh=False) as live:
        yield ConsoleReporter(live, is_new=is_new)


def say(line: str) -> None:
    """Report progress outside a live table."""
    print(line, file=sys.stderr, flush=True)


def progress_bar(*titles: str, is_transient: bool) -> Progress:
    """Return a progress bar for tasks with a known number of steps, shown only on a terminal. titles: shown before it.

    is_transient: remove it at the end.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    parts = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    is_terminal = sys.stderr.isatty()
    return Progress(*titles, *parts, console=Console(stderr=True), disable=not is_terminal, transient=is_transient)


def columns(rows: list[list[str]], *, right: tuple[int, ...] = ()) -> str:
    """Format rows of equal length as aligned text. The first row is the heading. right: columns aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: list[str]) -> str:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, rows))


def _plain_line(replica: ReplicaReport) -> str:
    where = f" on {replica['node']}" if replica["node"] else ""
    waits_for = f": {replica['stage']}" if replica["state"] == "pending" and replica["stage"] else ""
    return f"{replica['id']} {replica['state']}{where}{waits_for}"


def _live_line(replica: ReplicaReport) -> str:
    bar = ""
    if replica["state"] == "loading":
        filled = round(_BAR_WIDTH * replica["fraction"])
        bar = "█" * filled + "░" * (_BAR_WIDTH - filled)
    return f"{replica['id']:<14} {replica['state']:<9} {bar} {replica['stage']}"
