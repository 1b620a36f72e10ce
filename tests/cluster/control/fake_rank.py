"""Rank without a model. The test controls its faults and when it finishes."""

from __future__ import annotations

import functools
import os
import signal
import threading
from pathlib import Path

from core.identity.credentials import Identity
from core.types.launch import Launch
from core.types.rank_api import Binding, Progress, RankStatus

_LOOK_S = 0.02


class FakeRank:
    """Implements core.types.rank_api.Rank.

    fault: "raises in load" or "dies in load" (rank 0 only), "slow load" (until the file `go` appears in the log
    directory), or "slow drain" (until the file `<replica>.finished` appears there). If the file `fails` exists, load
    raises in any case.
    """

    def __init__(self, launch: Launch, *, identity: Identity, fault: str = "") -> None:
        print(f"known by {identity.name.uri if identity.tls_credentials else 'nothing'}", flush=True)
        self._replica = identity.name.replica
        self._rank = identity.name.rank
        self._dir = Path(launch.log_dir)
        self._fault = fault
        self._state = "loading"
        self._stopped = threading.Event()

    def __str__(self) -> str:
        return f"{self._replica} was {self._state}"

    def bind(self) -> Binding:
        return {"pid": os.getpid(), "host": "node", "address": f"127.0.0.1:{20_000 + self._rank}", "device": "cpu"}

    def load(self, addresses: list[str]) -> None:
        print(f"loading with {len(addresses)} ranks", flush=True)
        if (self._fault == "raises in load" and self._rank == 0) or (self._dir / "fails").exists():
            raise ValueError("weights.safetensors is\ncut short")
        if self._fault == "dies in load" and self._rank == 0:
            print("about to die", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "slow load":
            self._wait_for(self._dir / "go")
        self._state = "ready"

    def progress(self) -> Progress:
        return {"stage": "reading weights", "fraction": 0.25 * (self._rank + 1)}

    def run_forever(self) -> None:
        self._stopped.wait()

    def status(self) -> RankStatus:
        if self._state == "draining" and self._has_finished:
            self._state = "drained"
        busy = 1 if self._replica.endswith("-0") else 0  # the oldest replica is busy
        blocks = {"total": 100, "free": 90, "cached": 10}
        return {"state": self._state, "running": busy, "waiting": 0, "blocks": blocks}

    def drain(self) -> None:
        self._state = "draining"

    def succeed(self, before: FakeRank) -> None:
        print(f"{self._replica} goes on where {before}", flush=True)
        before.stop()

    def stop(self) -> None:
        self._stopped.set()

    @property
    def _has_finished(self) -> bool:
        return self._fault != "slow drain" or (self._dir / f"{self._replica}.finished").exists()

    def _wait_for(self, path: Path) -> None:
        while not path.exists() and not self._stopped.wait(_LOOK_S):
            pass


raises_in_load = functools.partial(FakeRank, fault="raises in load")
dies_in_load = functools.partial(FakeRank, fault="dies in load")
slow_load = functools.partial(FakeRank, fault="slow load")
slow_drain = functools.partial(FakeRank, fault="slow drain")
