"""Autotuning: measures alternative implementations once per processor or GPU and stores the times beside the kernels.

Alternatives may sum in another order. Callers that need one fixed order do not use this.
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

# On a CPU: kernels without AMX, kernels with AMX, torch. On a GPU: weights in the activations' dtype, or in FP8.
KERNELS, TILES, TORCH, FP8 = "kernels", "tiles", "torch", "fp8"
# Smaller gains are noise, or are lost in calls from Python.
_GAIN = 1.3
# The best of these counts, because other processes use the machine too.
_TRIES = 5
# Parts of the file's key: times of another clock are not comparable.
_BY, _BY_GPU = "thread_time", "synchronized"
# Resolution of the clock.
_LEAST_S = 1e-9
# Maximum wait for another process that is measuring.
_MEASURE_S = 300.0

Ways = Mapping[str, Callable[[], object]]
Times = dict[str, dict[str, float]]


class MeasuredWays:
    """Seconds by workload and implementation.

    Measured on one thread: with several, other load on the machine would dominate their synchronization.
    """

    def __init__(self, path: Path, clock: Callable[[], float] | None = None) -> None:
        """path: file shared by the processes of one machine. clock: seconds; None: CPU time of this thread."""
        self._path = path
        # Thread time excludes other processes' work.
        self._clock = clock or time.thread_time
        self._times: Times = {}
        # Workloads requested by this process.
        self._used: Times = {}
        self._wait_s = _MEASURE_S

    @classmethod
    def of_this_machine(cls, version: str) -> MeasuredWays:
        """Open the machine's file. version: version of the kernels, which includes the processor."""
        return cls(_path_of(version, torch.__version__, _BY))

    @classmethod
    def of_gpu(cls, device: torch.device) -> MeasuredWays:
        """Open the file of this kind of GPU."""

        def clock() -> float:
            torch.cuda.synchronize(device)
            return time.perf_counter()

        return cls(_path_of(torch.cuda.get_device_name(device), torch.__version__, _BY_GPU), clock)

    def quickest(self, workload: str, ways: Ways) -> str:
        """Return the fastest of `ways` for workload `workload`. Runs them only if no stored measurement exists.

        ways: KERNELS and its alternatives.
        """
        self._used[workload] = self._seconds(workload, ways)
        return _quickest(self._used[workload])

    def table(self) -> list[dict[str, Any]]:
        """Return the measurements used by this process, as plain values."""
        return [
            {
                "what": workload,
                "ms": {name: round(took * 1e3, 3) for name, took in seconds.items()},
                "taken": _quickest(seconds),
            }
            for workload, seconds in self._used.items()
        ]

    def _seconds(self, workload: str, ways: Ways) -> dict[str, float]:
        if not self._has(workload, ways):
            self._times |= _read(self._path)
        if not self._has(workload, ways):
            with self._locked():
                self._times |= _read(self._path)
                if not self._has(workload, ways):
                    self._times[workload] = _measured(ways, self._clock)
                    self._write()
        return {name: self._times[workload][name] for name in ways}

    def _has(self, workload: str, ways: Ways) -> bool:
        return ways.keys() <= self._times.get(workload, {}).keys()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other measuring processes, if the directory can hold a lock file."""
        with ExitStack() as held:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(FileLock(self._path.with_suffix(".lock"), timeout=self._wait_s))
            # The directory is read-only, full or owned by another user, or the lock timed out.
            except OSError as error:
                logger.warning("measuring without a lock: %s", error)
                # Do not wait again: many shapes follow.
                self._wait_s = 0.0
            yield

    def _write(self) -> None:
        try:
            write_whole(self._path, json.dumps(self._times, indent=1))
        except DeployError as error:
            logger.warning("failed to save kernel measurements: %s", error)


def _path_of(*facts: str) -> Path:
    key = blake2b("\0".join(facts).encode(), digest_size=8).hexdigest()
    return cache_root() / "kernels" / f"{key}-ways.json"


def _quickest(seconds: Mapping[str, float]) -> str:
    """Return the fastest way; another one must beat the kernels by _GAIN. Torch breaks up the step's single program."""
    best = KERNELS
    for name in (TILES, TORCH, FP8):
        if seconds[best] > _GAIN * seconds.get(name, float("inf")):
            best = name
    return best


def _measured(ways: Ways, clock: Callable[[], float]) -> dict[str, float]:
    """Measure the ways in turn. If the kernels lose, they get a second round, because the result is stored for good."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for compute in ways.values():
            # The first call touches new memory and is not timed.
            compute()
        best = _best_of_tries(ways, clock, dict.fromkeys(ways, float("inf")))
        return best if _quickest(best) == KERNELS else _best_of_tries(ways, clock, best)
    finally:
        torch.set_num_threads(threads)


def _best_of_tries(ways: Ways, clock: Callable[[], float], best: dict[str, float]) -> dict[str, float]:
    best = dict(best)
    for _ in range(_TRIES):
        for name, compute in ways.items():
            begin = clock()
            compute()
            best[name] = min(best[name], max(clock() - begin, _LEAST_S))
    return best


def _read(path: Path) -> Times:
    """Read stored times; empty if the file is missing or malformed."""
    try:
        times = json.loads(path.read_text(encoding="utf-8"))
        return {
            str(workload): {
                str(name): took for name, value in ways.items() if 0 < (took := float(value)) < float("inf")
            }
            for workload, ways in times.items()
        }
    except (OSError, ValueError, AttributeError, TypeError, OverflowError, RecursionError):
        return {}
