"""Rank in its own process, without Ray, that can be killed or stopped at any time or at a chosen failpoint."""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from core.identity.credentials import Identity
from core.types.failpoint import FailpointStage
from core.types.launch import Launch
from core.types.request import Role
from engine.kv.block_manager import BlockManager
from tests.support import hosts
from tests.support.forks import forks
from tests.support.long_answers import Ceiling
from worker.rank_process import RankProcess

_MODULES = {Role.PREFILL: "prefill_worker.actor", Role.DECODE: "decode_worker.actor"}
_ANSWER_S = 110.0  # on a GPU the first rank compiles kernels while it loads
_END_S = 10.0
# Default log of ranks; set RANKS_LOG=FILE to debug them.
RANKS_LOG = os.environ.get("RANKS_LOG", os.devnull)


def shared_ceiling(num_tokens: int) -> Ceiling:
    """Make a ceiling for ranks in processes; `lift` acts on all of them."""
    return Ceiling(num_tokens, lifted=forks.Event())


@dataclass(frozen=True)
class Fault:
    """Signal that the process sends to itself when it reaches a failpoint for the `nth` time."""

    stage: FailpointStage
    nth: int = 1
    number: signal.Signals = signal.SIGKILL


class FaultyProbe:
    """Failpoint that injects the faults."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self._faults = [(fault, itertools.count(1)) for fault in faults]

    def __call__(self, stage: FailpointStage, id: str) -> None:
        for fault, times in self._faults:
            if fault.stage is stage and next(times) == fault.nth:
                os.kill(os.getpid(), fault.number)


def audit(rank: RankProcess, *, clear: bool) -> None:
    """Assert on its step thread that an idle rank 0 has all its blocks, and that its tables agree.

    The pools of other ranks follow it. clear: forget all cached blocks and states, too.
    """
    service, parts = rank._service, rank._parts
    if not service or not parts:
        return
    result: Future[None] = Future()

    def check() -> None:
        try:
            parts.tiers.table.check_integrity()
            assert not service.worker.num_requests and service.worker.is_whole, "a request holds blocks"
            if clear:
                _forget_all(parts.blocks)
            result.set_result(None)
        except Exception as error:  # raised in the test; here it would end the step thread
            result.set_exception(error)

    service.post(check)
    result.result(_END_S)


def _forget_all(blocks: BlockManager) -> None:
    if states := blocks.states:
        for prefix_hash in states.full_hashes():
            states.forget(prefix_hash)
    for prefix_hash in blocks.full_hashes():
        blocks.discard(prefix_hash)
    blocks.check_integrity()


class RankInProcess:
    """The part of core.types.rank_api.Rank that tests need. Used by one caller at a time."""

    def __init__(
        self,
        role: Role,
        launch: Launch,
        *,
        faults: tuple[Fault, ...] = (),
        ceiling: Ceiling | None = None,
        prepare: Callable[[], None] | None = None,
        log: str = RANKS_LOG,
        network: str = "",
        **arguments: Any,
    ) -> None:
        """prepare: called first in the process. network: network namespace to run in."""
        self._connection, theirs = forks.Pipe()
        self._lock = threading.Lock()
        before = [each for each in (ceiling and ceiling.arm, prepare) if each]
        self.process = forks.Process(
            target=_serve,
            args=(theirs, role, launch, arguments, faults, before, log, network),
            daemon=True,
        )
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid
        return self.process.pid

    @property
    def state(self) -> str:
        """Process state as in /proc: R and S are alive, T is stopped, Z and X are dead."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return "X"

    def send(self, number: signal.Signals) -> None:
        """Send a signal. Waits for the end of a killed process."""
        os.kill(self.pid, number)
        if number is signal.SIGKILL:
            self.process.join(_END_S)

    def bind(self) -> Any:
        return self._ask("bind")

    def load(self, addresses: list[str]) -> Any:
        return self._ask("load", addresses)

    def status(self) -> Any:
        return self._ask("status")

    def drain(self) -> None:
        self._ask("drain")

    def become(self, role: Role, identity: Identity) -> Any:
        """Switch the role, like cluster.ray.rank_actor: the drained process becomes a rank of another replica."""
        return self._ask("become", role, identity)

    def audit(self, *, clear: bool) -> None:
        self._ask("audit", clear)

    def stop(self) -> None:
        """Leave in order; a dead or hanging process is only reaped."""
        if self.process.is_alive():
            try:
                os.kill(self.pid, signal.SIGCONT)
                self._ask("stop")
            except (EOFError, OSError, TimeoutError):
                self.process.kill()
        self._connection.close()
        self.process.join(_END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(_END_S)
        self.process.close()

    def _ask(self, method: str, *args: Any) -> Any:
        with self._lock:
            self._connection.send((method, args))
            if not self._connection.poll(_ANSWER_S):
                raise TimeoutError(f"pid {self.pid}: {method} takes more than {_ANSWER_S} s")
            answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(
    connection: Connection,
    role: Role,
    launch: Launch,
    arguments: dict[str, Any],
    faults: tuple[Fault, ...],
    before: Sequence[Callable[[], None]],
    log: str,
    network: str,
) -> None:
    """Process main: execute calls until `stop`, or until the other side is gone."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    logging.basicConfig(level=logging.INFO, force=True)
    os.environ["NCCL_HOSTID"] = str(os.getpid())  # lets ranks share a GPU, which NCCL rejects otherwise
    if network:
        hosts.enter(network)
    for prepare in before:
        prepare()
    rank = _Rank(partial(_make, launch, failpoint=FaultyProbe(faults), **arguments), role)
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            os._exit(1)
        try:
            answer = rank.do(method, *args)
        except Exception as error:  # sent back to the caller
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        connection.send(answer)
        if method == "stop":
            connection.close()
            os._exit(0)


class _Rank:
    """Current rank of the process; a role switch replaces it."""

    def __init__(self, make: Callable[..., Any], role: Role) -> None:
        self._make = make
        self._now = make(role)

    def do(self, method: str, *args: Any) -> Any:
        match method:
            case "become":
                return self._become(*args)
            case "audit":
                return audit(self._now, clear=args[0])
            case _:
                return getattr(self._now, method)(*args)

    def _become(self, role: Role, identity: Identity) -> Any:
        successor = self._make(role, identity=identity)
        binding = successor.bind()
        successor.succeed(self._now)
        self._now = successor
        return binding


def _make(launch: Launch, role: Role, **arguments: Any) -> Any:
    return importlib.import_module(_MODULES[role]).make_rank(launch, **arguments)
