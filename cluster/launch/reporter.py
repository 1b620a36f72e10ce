"""Interface for progress output of long commands."""

from __future__ import annotations

from typing import Protocol

from cluster.control.report import Pools


class Reporter(Protocol):
    """Receiver of progress from deploy() and from waits for pools."""

    def say(self, line: str) -> None: ...

    def show(self, pools: Pools) -> None:
        """Show the state of every replica. Called a few times a second."""
        ...
