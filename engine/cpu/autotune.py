"""What each of several ways to compute one thing takes on this processor: measured once, and kept beside the compiled
kernels, so that nobody has to know which processors have which units.

One way may be another order of summation: whoever has promised one order asks for none of this.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from core.model.source import cache_root
from core.process.atomic_file import write_whole
from core.types.errors import DeployError

logger = logging.getLogger(__name__)

KERNELS, TILES, TORCH = "kernels", "tiles", "torch"  # our kernels, also by AMX
_GAIN = 1.3  # less is noise, or lost again between calls from Python
_TRIES = 5  # the best counts: others use the machine, too
_BY = "thread_time"  # times by another clock are not comparable
_LEAST_S = 1e-9  # what the clock says of less
_MEASURE_S = 300.0  # a neighbour may be at it

Ways = Mapping[str, Callable[[], object]]
Times = dict[str, dict[str, float]]


class MeasuredWays:
    """Seconds by what is computed and by way. One thread measures: with several, whoever else uses the machine decides
    how long they wait for each other."""

    def __init__(self, path: Path) -> None:
        """path: of the file; processes of one machine share it."""
        self._path = path
        self._times: Times = {}
        self._used: Times = {}  # what was asked for by this process
        self._wait_s = _MEASURE_S

    @classmethod
    def of_this_machine(cls, version: str) -> MeasuredWays:
        """version: of the kernels, and so of the processor."""
        facts = version, torch.__version__, _BY
        key = blake2b("\0".join(facts).encode(), digest_size=8).hexdigest()
        return cls(cache_root() / "kernels" / f"{key}-ways.json")

    def quickest(self, what: str, ways: Ways) -> str:
        """ways: KERNELS, and others that compute `what`. They are called only where nobody has measured them before."""
        self._used[what] = self._seconds(what, ways)
        return _quickest(self._used[what])

    def table(self) -> list[dict[str, Any]]:
        """What was asked for, as plain values."""
        return [
            {
                "what": what,
                "ms": {name: round(took * 1e3, 3) for name, took in seconds.items()},
                "taken": _quickest(seconds),
            }
            for what, seconds in self._used.items()
        ]

    def _seconds(self, what: str, ways: Ways) -> dict[str, float]:
        if not self._knows(what, ways):
            self._times |= _read(self._path)
        if not self._knows(what, ways):
            with self._alone():
                self._times |= _read(self._path)
                if not self._knows(what, ways):
                    self._times[what] = _measured(ways)
                    self._write()
        return {name: self._times[what][name] for name in ways}

    def _knows(self, what: str, ways: Ways) -> bool:
        return ways.keys() <= self._times.get(what, {}).keys()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody beside it measures, where its directory lets them tell each other."""
        with ExitStack() as held:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(FileLock(self._path.with_suffix(".lock"), timeout=self._wait_s))
            except OSError as error:  # it is read-only or full, say, or another user's; or a neighbour takes too long
                logger.warning("measuring without a look at who else does: %s", error)
                self._wait_s = 0.0  # once is enough: there are many shapes
            yield

    def _write(self) -> None:
        try:
            write_whole(self._path, json.dumps(self._times, indent=1))
        except DeployError as error:
            logger.warning("what was measured is not kept: %s", error)


def _quickest(seconds: Mapping[str, float]) -> str:
    """Torch's only where it is better than either of ours: it leaves no step one program."""
    taken = KERNELS
    for name in (TILES, TORCH):
        if seconds[taken] > _GAIN * seconds.get(name, float("inf")):
            taken = name
    return taken


def _measured(ways: Ways) -> dict[str, float]:
    """They take turns. Where the kernels lose they have another try: what they have lost by a neighbour's work would be
    kept for good."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for compute in ways.values():
            compute()  # the first time it meets memory that was never touched
        best = _best_of_tries(ways, dict.fromkeys(ways, float("inf")))
        return best if _quickest(best) == KERNELS else _best_of_tries(ways, best)
    finally:
        torch.set_num_threads(threads)


def _best_of_tries(ways: Ways, best: dict[str, float]) -> dict[str, float]:
    best = dict(best)
    for _ in range(_TRIES):
        for name, compute in ways.items():
            begin = time.thread_time()  # not what others do meanwhile on its processor
            compute()
            best[name] = min(best[name], max(time.thread_time() - begin, _LEAST_S))
    return best


def _read(path: Path) -> Times:
    """Nothing where there is none, or what is there was not written by us."""
    try:
        times = json.loads(path.read_text())
        return {
            str(what): {str(name): took for name, given in ways.items() if 0 < (took := float(given)) < float("inf")}
            for what, ways in times.items()
        }
    except (OSError, ValueError, AttributeError, TypeError, OverflowError, RecursionError):
        return {}
