"""Runner of the `cluster` command as a process, with its two streams and exit code."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.cli.app import run

_ROOT = Path(__file__).parents[3]
# A suite started in the background by a shell ignores SIGINT, and so would the commands it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class CommandInProcess:
    """The real command in the test's process, which saves the start of an interpreter."""

    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch

    def run(self, *arguments: str, stdin: str | bytes = "") -> Outcome:
        sent = stdin.encode() if isinstance(stdin, str) else stdin
        self.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(sent), encoding="utf-8"))
        return Outcome(run(list(arguments)), *self.capsys.readouterr())


@dataclass(frozen=True)
class ClusterCommand:
    """The real command, or the one with fake parts (`is_fake`), with its own state directory."""

    state_root: Path
    ray_environment: tuple[tuple[str, str], ...] = ()
    # The real command.
    program: str = "cluster.cli"

    def run(self, *arguments: str, is_fake: bool = False, stdin: str = "", within_s: float = 150) -> Outcome:
        with self.start(*arguments, is_fake=is_fake) as process:
            out, err = process.communicate(stdin, timeout=within_s)
        return Outcome(process.returncode, out, err)

    def start(self, *arguments: str, is_fake: bool = False) -> subprocess.Popen[str]:
        program = "tests.cluster.cli.fake_cluster" if is_fake else self.program
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, "-m", program, *arguments],
            env=self._environment,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )

    @property
    def _environment(self) -> dict[str, str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        environment |= dict(self.ray_environment)
        return {
            **environment,
            "PYTHONPATH": str(_ROOT),
            "CLUSTER_STATE_DIR": str(self.state_root),
            "PYTHONWARNINGS": "ignore",
        }
