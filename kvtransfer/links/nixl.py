"""Links over NIXL (`pip install nixl`): one-sided reads, by whatever UCX finds between two hosts, of CPUs or GPUs.

    sender   ──> receiver    offer: its number, where it lies, and the keys to it if its memory is new to the receiver
    receiver                 reads it
    receiver ──> sender      done: its number, with the last byte

Nobody writes into the other's memory: what a link receives it has fetched. What crosses the wire may come in any order.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from core.types.errors import LinkClosed, SpecError
from kvtransfer.links.device_stream import StreamEvent
from kvtransfer.links.link import LinkEnd, Operation

_POLL_S = 5e-5
_OFFER = struct.Struct("=QQQI")  # number, address, bytes, device; then the keys
_DONE = struct.Struct("=Q")  # number
_MAX_REGISTERED = 8  # pieces of memory: a link passes its payloads through a few buffers


def check_nixl() -> None:
    """Raises SpecError where the package is not installed."""
    if find_spec("nixl") is None:
        raise SpecError("kv.host_link: nixl is not installed here: pip install nixl on every node")


class NixlLink:
    """An agent of NIXL at each end, which only this link uses.

    Everything is done by the thread that uses the link, while it waits. Its calls to NIXL return at once; what they
    started is looked at again and again. An operation does not end where the peer is gone, nor is there a way to end
    it: so when a deadline has passed, or after `close`, the agent is taken apart on a thread of its own, and memory
    that it could still write to is held until that is done.
    """

    backend = "nixl"
    num_buffers = 2

    def __init__(self, end: LinkEnd) -> None:
        """Raises SpecError."""
        check_nixl()
        self.device = end.device
        self._end = end
        self._closed = threading.Event()
        self._agent_lock = threading.Lock()  # of all below: of the thread that uses the link, and of who ends it
        self._agent: _Agent | None = None
        self._num_started = self._num_done = 0  # operations
        self._receives: deque[tuple[int, Tensor, StreamEvent]] = deque()  # not begun
        self._offers: dict[int, bytes] = {}  # that nobody has read yet
        self._reads: deque[tuple[Tensor, Any]] = deque()  # under way
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
            if self._closed.is_set():  # before it was there to be taken apart
                self._take_apart()
            self._check_open()
            store.set(ours, agent.introduction)  # type: ignore[arg-type]  # torch's stubs know no bytes
            store.wait([theirs], timedelta(seconds=end.timeout_s))
            introduction = store.get(theirs)
            with self._agent_lock:
                self._check_open()
                agent.meet(introduction)
        except _errors() as error:
            self.close()
            raise LinkClosed(f"link {end.prefix}: the peer did not come: {error}") from error
        greeting = torch.zeros(1, dtype=torch.uint8, device=end.device)  # connections are made by what uses them
        operation = self.send(greeting) if end.is_sender else self.recv(greeting)
        operation.wait(timeout_s=max(0.0, until - time.monotonic()))

    def send(self, payload: Tensor) -> Operation:
        StreamEvent(self.device).wait()  # NIXL knows no streams: whoever reads the payload must find it there

        def offer(agent: _Agent, number: int) -> None:
            agent.offer(number, payload)
            self._sends[number] = payload

        return self._start(offer)

    def recv(self, payload: Tensor) -> Operation:
        mark = StreamEvent(self.device)  # what its memory was used for before
        return self._start(lambda agent, number: self._receives.append((number, payload, mark)))

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            threading.Thread(target=self._take_apart, name="kv-nixl-end").start()

    def wait_for(self, number: int, *, timeout_s: float) -> None:
        """Until so many operations have ended. Raises LinkClosed."""
        deadline = time.monotonic() + timeout_s
        while self._using(self._progress) < number:
            if time.monotonic() > deadline:
                self.close()
                raise LinkClosed(f"nixl: an operation took longer than {timeout_s:.1f} s")
            time.sleep(_POLL_S)

    def _start(self, start: Callable[[_Agent, int], None]) -> Operation:
        self._using(lambda agent: start(agent, self._num_started))
        self._num_started += 1
        return _NixlOperation(self, self._num_started)

    def _using(self, use: Callable[[_Agent], Any]) -> Any:
        """Raises LinkClosed."""
        with self._agent_lock:
            self._check_open()
            if self._agent is None:
                raise LinkClosed("the link has not met its peer")
            try:
                return use(self._agent)
            except _errors() as error:
                self.close()
                raise LinkClosed(f"nixl: {error}") from error

    def _progress(self, agent: _Agent) -> int:
        """See what has come, begin what can be begun. Returns how many operations have ended."""
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

    def _take_apart(self) -> None:
        """The agent first, and only then what it could reach."""
        with self._agent_lock:
            held = [*self._receives, *self._reads, *self._sends.values()]
            agent, self._agent = self._agent, None
            for pending in (self._receives, self._reads, self._sends):
                pending.clear()
        if agent:
            agent.end()
        del held


class _NixlOperation:
    def __init__(self, link: NixlLink, number: int) -> None:
        self._link = link
        self._number = number

    def wait(self, *, timeout_s: float) -> None:
        self._link.wait_for(self._number, timeout_s=timeout_s)


@dataclass(eq=False)
class _Registered:
    """Memory that NIXL knows. It stays what it is as long as it is held here."""

    storage: torch.UntypedStorage
    descriptors: Any


class _Agent:
    """NIXL's own, and the memory that it knows. Its calls raise what `_errors` names."""

    def __init__(self, name: str, device: torch.device) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        nixl_logger = logging.getLogger("nixl")  # it prints, where ours go elsewhere and somebody may read JSON
        nixl_logger.handlers.clear()
        nixl_logger.propagate = True
        nixl_logger.setLevel(logging.WARNING)
        # A thread of NIXL's would keep a core busy for each link; whoever waits for an operation looks anyway.
        self._agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._device = device
        self._memory = "VRAM" if device.type == "cuda" else "DRAM"
        self._registered: dict[tuple[int, int], _Registered] = {}  # by address and size; used last comes last
        self._peer = ""

    @property
    def introduction(self) -> bytes:
        introduction: bytes = self._agent.get_agent_metadata()
        return introduction

    def meet(self, introduction: bytes) -> None:
        self._peer = _name(self._agent.add_remote_agent(introduction))

    def messages(self) -> list[bytes]:
        messages: list[bytes] = self._agent.get_new_notifs().get(self._peer, [])
        return messages

    def offer(self, number: int, payload: Tensor) -> None:
        new = self._know(payload)
        keys = self._agent.get_partial_agent_metadata(new.descriptors, False, ["UCX"]) if new else b""
        place = _OFFER.pack(number, payload.data_ptr(), payload.numel(), payload.device.index or 0)
        self._agent.send_notif(self._peer, place + keys)

    def read(self, offer: bytes, payload: Tensor) -> Any:
        """Start to read what was offered. Returns what `is_over` takes."""
        number, address, num_bytes, device = _OFFER.unpack_from(offer)
        if num_bytes != payload.numel():
            raise RuntimeError(f"{num_bytes} bytes are offered where {payload.numel()} were announced")
        if keys := offer[_OFFER.size :]:
            self._agent.add_remote_agent(keys)
        self._know(payload)
        here = (payload.data_ptr(), num_bytes, payload.device.index or 0)
        descriptors = [
            self._agent.get_xfer_descs([place], self._memory) for place in (here, (address, num_bytes, device))
        ]
        transfer = self._agent.initialize_xfer("READ", *descriptors, self._peer, _DONE.pack(number))
        if self._agent.transfer(transfer) == "ERR":
            raise RuntimeError("the peer's memory cannot be read")
        return transfer

    def is_over(self, transfer: Any) -> bool:
        state = self._agent.check_xfer_state(transfer)
        if state == "ERR":
            raise RuntimeError("a read of the peer's memory has failed")
        if state == "DONE":
            self._agent.release_xfer_handle(transfer)
        return bool(state == "DONE")

    def end(self) -> None:
        """Take it apart: what is under way ends."""
        for registered in self._registered.values():
            with suppress(*_errors()):
                self._agent.deregister_memory(registered.descriptors)
        del self._agent
        self._registered.clear()

    def _know(self, payload: Tensor) -> _Registered | None:
        """Register the whole buffer that a payload is part of; None if it is known. The one used longest ago goes."""
        storage = payload.untyped_storage()
        place = storage.data_ptr(), storage.nbytes()
        known = self._registered.pop(place, None)
        if known:
            self._registered[place] = known
            return None
        if len(self._registered) >= _MAX_REGISTERED:
            oldest = self._registered.pop(next(iter(self._registered)))
            self._agent.deregister_memory(oldest.descriptors)
        descriptors = self._agent.register_memory([(*place, payload.device.index or 0, "")], self._memory)
        new = self._registered[place] = _Registered(storage, descriptors)
        return new


@lru_cache(maxsize=1)
def _errors() -> tuple[type[Exception], ...]:
    """NIXL's, which have nothing in common; RuntimeError, the store's; and of messages that are none of ours."""
    from nixl import _bindings

    all_its_own = [one for one in vars(_bindings).values() if isinstance(one, type) and issubclass(one, Exception)]
    return RuntimeError, struct.error, *all_its_own


def _name(said: str | bytes) -> str:
    return said.decode() if isinstance(said, bytes) else said
