"""Repeated runs of the suite that expose tests which depend on time, order or a race.

    make test-repeat                        # six runs: as it is, beside a busy core, in random order, each twice
    python tests/support/repeat.py --runs busy random=1234 slow -- tests/e2e -k drain

plain · busy: beside a process that keeps one core busy · random[=SEED]: files and tests in random order · slow: on one
core, at the lowest priority. Prints a line per run with its log's name and the command that repeats the failed tests.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_SIX = ["plain", "busy", "random", "plain", "busy", "random"]
_SPIN = [sys.executable, "-c", "import os; us = os.getppid()\nwhile os.getppid() == us: pass"]  # ends with its parent


@dataclass(frozen=True)
class Run:
    kind: str
    seed: int

    @classmethod
    def parse(cls, text: str) -> Run:
        kind, _, seed = text.partition("=")
        if kind not in ("plain", "busy", "random", "slow") or (seed and kind != "random"):
            raise argparse.ArgumentTypeError(f"{text}: not plain, busy, random[=SEED] or slow")
        return cls(kind, int(seed) if seed else random.SystemRandom().randrange(1_000_000))

    def __str__(self) -> str:
        return f"random={self.seed}" if self.kind == "random" else self.kind

    def command(self, options: list[str]) -> list[str]:
        before = ["nice", "-n", "19", "taskset", "-c", str(min(os.sched_getaffinity(0)))] if self.kind == "slow" else []
        order = ["--random-order", f"--random-order-seed={self.seed}"] if self.kind == "random" else []
        return [*before, sys.executable, "-m", "pytest", *order, *options]

    def execute(self, options: list[str], log: Path) -> int:
        """Run it with pytest's output in `log`. Returns the exit code."""
        with ExitStack() as stack:
            if self.kind == "busy":
                busy = stack.enter_context(subprocess.Popen(_SPIN))
                stack.callback(busy.kill)
            output = stack.enter_context(log.open("wb"))
            return subprocess.run(
                self.command(options), cwd=_ROOT, stdout=output, stderr=output, check=False
            ).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", type=Run.parse, default=[Run.parse(text) for text in _SIX], metavar="KIND")
    parser.add_argument("options", nargs="*", help="for pytest, after --")
    arguments = parser.parse_args()
    logs, num_failed = Path(tempfile.mkdtemp(prefix="suite-")), 0
    for number, run in enumerate(arguments.runs, start=1):
        log, begin = logs / f"{number}-{run.kind}.log", time.monotonic()
        code = run.execute(arguments.options, log)
        num_failed += code != 0
        summary = log.read_text(errors="replace").splitlines()
        print(f"{number} {run}: {summary[-1] if summary else ''} [{time.monotonic() - begin:.0f} s; {log}]", flush=True)
        for line in summary:
            if re.match(r"(FAILED|ERROR) tests/", line):
                print(f"    {line}", flush=True)
        if code:
            print(f"    again: {shlex.join(run.command(arguments.options))}", flush=True)
    print(f"{len(arguments.runs) - num_failed} of {len(arguments.runs)} runs passed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
