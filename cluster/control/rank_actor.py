"""The process of a rank: a Ray actor that imports by path what makes the rank, and hands every call on to it.

The controller starts this class, which imports the code of the role in a process of its own: so neither the controller
nor the command line ever imports torch, and what goes wrong while importing is reported like everything else.
"""

from __future__ import annotations

import importlib
import logging
import time
from typing import cast

from cluster.control.certificates import open_identity
from cluster.process.garbage import spare_the_old
from cluster.process.log import LogPart, log_path, read_log, redirect_output
from cluster.words.launch import Launch
from cluster.words.process_name import ProcessName
from cluster.words.rank import Binding, Progress, Rank, RankStatus

logger = logging.getLogger(__name__)

# A call of run_forever stays for good, and a controller that restarted adds another: they have threads of their own, so
# that they never keep `status` or `drain` waiting.
CONCURRENCY_GROUPS = {"watch": 16, "control": 8}


class RankActor:
    """One rank of one replica, for the controller. See cluster.words.rank.Rank for what each method means."""

    def __init__(self, import_path: str, launch: Launch, name: ProcessName) -> None:
        self._import_path = import_path
        self._launch = launch
        self._name = name
        self._log = log_path(launch.log_dir, name.replica, name.rank)
        self._rank: Rank | None = None
        redirect_output(self._log, who=str(name))

    def bind(self) -> Binding:
        if self._rank is None:
            module, _, name = self._import_path.partition(":")
            began_at = time.monotonic()
            make = getattr(importlib.import_module(module), name)
            logger.info("%s imported in %.1f s", module, time.monotonic() - began_at)
            identity = open_identity(self._name, tls=self._launch.spec.security.tls)
            self._rank = cast(Rank, make(self._launch, identity=identity))
        return self._rank.bind()

    def load(self, addresses: list[str]) -> None:
        self._bound.load(addresses)
        spare_the_old()

    def progress(self) -> Progress:
        return self._bound.progress()

    def run_forever(self) -> None:
        self._bound.run_forever()

    def status(self) -> RankStatus:
        return self._bound.status()

    def drain(self) -> None:
        self._bound.drain()

    def stop(self) -> None:
        if self._rank is not None:
            self._rank.stop()

    def read_log(self, lines: int, start: int | None = None) -> LogPart:
        return read_log(self._log, lines=lines, start=start)

    @property
    def _bound(self) -> Rank:
        assert self._rank is not None, "bind() comes first"
        return self._rank
