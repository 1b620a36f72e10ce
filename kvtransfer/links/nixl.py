"""Links over NIXL (`pip install nixl`): one-sided reads over any UCX transport, for CPUs and GPUs.

    sender   ──> receiver    offer: number, address, and memory keys if the memory is new to the receiver
    receiver                 reads the payload
    receiver ──> sender      done: number, with the last byte

Neither side writes into the other's memory. Messages may arrive in any order.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from core.types.errors import LinkClosed, SpecError
from engine.runner.streams import Event
from kvtransfer.links.link import LinkEnd, Operation, Waiting, stream_event

_POLL_S = 5e-5
_OFFER = struct.Struct("=QQQI")  # number, address, bytes, device; memory keys follow
_DONE = struct.Struct("=Q")  # number
_MAX_REGISTERED = 8  # memory regions: a link reuses a few staging buffers


def check_nixl() -> None:
    """Raise SpecError if the nixl package is not installed."""
    if find_spec("nixl") is None:
        raise SpecError("kv.host_link: nixl is not installed: pip install nixl on every node")


class NixlLink:
    """Link with a dedicated NIXL agent at each end.

    The caller's thread makes all progress while it waits, by polling non-blocking NIXL calls. An operation whose peer
    is gone neither ends nor can be cancelled. So after a missed deadline or `close`, a separate thread destroys the
    agent, and memory that the agent could still write to is referenced until then.
    """

    backend = "nixl"
    num_buffers = 2

    def __init__(self, end: LinkEnd) -> None:
        """Raises SpecError if nixl is not installed."""
        check_nixl()
        self.device = end.device
        self._end = end
        self._closed = threading.Event()
        # Guards the fields below against the thread that destroys the agent.
        self._agent_lock = threading.Lock()
        self._agent: _Agent | None = None
        self._num_started = self._num_done = 0  # operations
        self._receives: deque[tuple[int, Tensor, Event]] = deque()  # reads not started
        self._offers: dict[int, bytes] = {}  # received, not yet read
        self._reads: deque[tuple[Tensor, Any]] = deque()  # in progress
        self._sends: dict[int, Tensor] = {}

    def meet(self) -> None:
        self._check_open()
        end = self._end
        until = time.monotonic() + end.timeout_s
        ours, theirs = ("sender", "receiver") if end.is_sender else ("receiver", "sender")
        store = PrefixStore(end.prefix, end.store)
        try:
            agent = _Agent(f"{end.prefix}/{ours}", end.device)
            with self._agent_lock:
                self._agent = agent
            if self._closed.is_set():  # closed before the agent was stored
                self._destroy()
            self._check_open()
            store.set(ours, agent.introduction)  # type: ignore[arg-type]  # torch's stubs lack bytes
            store.wait([theirs], timedelta(seconds=end.timeout_s))
            introduction = store.get(theirs)
            with self._agent_lock:
                self._check_open()
                agent.meet(introduction)
        except _errors() as error:
            self.close()
            raise LinkClosed(f"link {end.prefix}: peer did not connect: {error}") from error
        # UCX connects on first use, so transfer one byte now.
        greeting = torch.zeros(1, dtype=torch.uint8, device=end.device)
        operation = self.send(greeting) if end.is_sender else self.recv(greeting)
        operation.wait(timeout_s=max(0.0, until - time.monotonic()))

    def send(self, payload: Tensor) -> Operation:
        stream_event(self.device).wait()  # NIXL ignores CUDA streams, so the payload must be complete

        def offer(agent: _Agent, number: int) -> None:
            agent.offer(number, payload)
            self._sends[number] = payload

        return self._start(offer)

    def recv(self, payload: Tensor) -> Operation:
        event = stream_event(self.device)  # earlier uses of the payload's memory
        return self._start(lambda agent, number: self._receives.append((number, payload, event)))

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            threading.Thread(target=self._destroy, name="kv-nixl-end").start()

    def _wait(self, number: int, timeout_s: float) -> None:
        """Wait until `number` operations have completed. Raises LinkClosed."""
        deadline = time.monotonic() + timeout_s
        while self._using(self._progress) < number:
            if time.monotonic() > deadline:
                self.close()
                raise LinkClosed(f"nixl: operation timed out after {timeout_s:.1f} s")
            time.sleep(_POLL_S)

    def _start(self, start: Callable[[_Agent, int], None]) -> Operation:
        self._using(lambda agent: start(agent, self._num_started))
        self._num_started += 1
        number = self._num_started
        return Waiting(lambda timeout_s: self._wait(number, timeout_s))

    def _using(self, use: Callable[[_Agent], Any]) -> Any:
        """Call `use` with the agent under its lock. Raises LinkClosed."""
        with self._agent_lock:
            self._check_open()
            if self._agent is None:
                raise LinkClosed("the link is not connected")
            try:
                return use(self._agent)
            except _errors() as error:
                self.close()
                raise LinkClosed(f"nixl: {error}") from error

    def _progress(self, agent: _Agent) -> int:
        """Process messages and start reads. Returns the number of completed operations."""
        for message in agent.messages():
            if self._end.is_sender:
                self._sends.pop(_DONE.unpack(message)[0], None)
            else:
                self._offers[_OFFER.unpack_from(message)[0]] = message
        if self._end.is_sender:
            self._num_done = min(self._sends, default=self._num_started)
        while self._receives and self._receives[0][0] in self._offers and self._receives[0][2].is_over:
            number, payload, _ = self._receives.popleft()
            self._reads.append((payload, agent.read(self._offers.pop(number), payload)))
        while self._reads and agent.is_over(self._reads[0][1]):
            self._reads.popleft()
            self._num_done += 1
        return self._num_done

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise LinkClosed("the link is closed")

    def _destroy(self) -> None:
        """Destroy the agent, then release the memory that it could reach."""
        with self._agent_lock:
            held = [*self._receives, *self._reads, *self._sends.values()]
            agent, self._agent = self._agent, None
            for pending in (self._receives, self._reads, self._sends):
                pending.clear()
        if agent:
            agent.end()
        del held


class _Agent:
    """A NIXL agent and its registered memory. Its methods raise the exceptions of `_errors`."""

    def __init__(self, name: str, device: torch.device) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        # nixl installs a handler that prints plain text; route its log through ours, which may be JSON.
        nixl_logger = logging.getLogger("nixl")
        nixl_logger.handlers.clear()
        nixl_logger.propagate = True
        nixl_logger.setLevel(logging.WARNING)
        # No progress thread: it would keep a core busy per link, and waiting callers poll anyway.
        self._agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._device = device
        self._memory = "VRAM" if device.type == "cuda" else "DRAM"
        # Storage, which the reference keeps alive, and its descriptors; by (address, size), least recently used first.
        self._registered: dict[tuple[int, int], tuple[torch.UntypedStorage, Any]] = {}
        self._peer = ""

    @property
    def introduction(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def meet(self, introduction: bytes) -> None:
        name = self._agent.add_remote_agent(introduction)
        self._peer = name.decode() if isinstance(name, bytes) else name

    def messages(self) -> list[bytes]:
        return list(self._agent.get_new_notifs().get(self._peer, []))

    def offer(self, number: int, payload: Tensor) -> None:
        new = self._register(payload)
        keys = self._agent.get_partial_agent_metadata(new, False, ["UCX"]) if new else b""
        place = _OFFER.pack(number, payload.data_ptr(), payload.numel(), payload.device.index or 0)
        self._agent.send_notif(self._peer, place + keys)

    def read(self, offer: bytes, payload: Tensor) -> Any:
        """Start reading an offered payload. Returns a transfer handle for `is_over`."""
        number, address, num_bytes, device = _OFFER.unpack_from(offer)
        if num_bytes != payload.numel():
            raise RuntimeError(f"peer offered {num_bytes} bytes, announced {payload.numel()}")
        if keys := offer[_OFFER.size :]:
            self._agent.add_remote_agent(keys)
        self._register(payload)
        here = (payload.data_ptr(), num_bytes, payload.device.index or 0)
        descriptors = [
            self._agent.get_xfer_descs([place], self._memory) for place in (here, (address, num_bytes, device))
        ]
        transfer = self._agent.initialize_xfer("READ", *descriptors, self._peer, _DONE.pack(number))
        if self._agent.transfer(transfer) == "ERR":
            raise RuntimeError("failed to start reading the peer's memory")
        return transfer

    def is_over(self, transfer: Any) -> bool:
        state = self._agent.check_xfer_state(transfer)
        if state == "ERR":
            raise RuntimeError("reading the peer's memory failed")
        if state == "DONE":
            self._agent.release_xfer_handle(transfer)
        return bool(state == "DONE")

    def end(self) -> None:
        """Deregister memory and destroy the agent, which ends transfers in progress."""
        for _, descriptors in self._registered.values():
            with suppress(*_errors()):
                self._agent.deregister_memory(descriptors)
        del self._agent
        self._registered.clear()

    def _register(self, payload: Tensor) -> Any:
        """Register the payload's storage, evicting the least recently used.

        Returns its descriptors, or None if it was registered already.
        """
        storage = payload.untyped_storage()
        place = storage.data_ptr(), storage.nbytes()
        if known := self._registered.pop(place, None):
            self._registered[place] = known
            return None
        if len(self._registered) >= _MAX_REGISTERED:
            _, oldest = self._registered.pop(next(iter(self._registered)))
            self._agent.deregister_memory(oldest)
        new = self._agent.register_memory([(*place, payload.device.index or 0, "")], self._memory)
        self._registered[place] = storage, new
        return new


@lru_cache(maxsize=1)
def _errors() -> tuple[type[Exception], ...]:
    """Return the exceptions to catch: NIXL's, which share no base; the store's RuntimeError; malformed messages."""
    from nixl import _bindings

    nixl_errors = [
        value for value in vars(_bindings).values() if isinstance(value, type) and issubclass(value, Exception)
    ]
    return RuntimeError, struct.error, *nixl_errors
