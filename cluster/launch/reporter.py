"""Where the progress of a long command goes."""

from __future__ import annotations

from typing import Protocol

from cluster.control.report import Pools


class Reporter(Protocol):
    """Told by deploy(), and by whoever waits for pools."""

    def say(self, line: str) -> None: ...

    def show(self, pools: Pools) -> None:
        """The state of every replica; called a few times a second."""
        ...
