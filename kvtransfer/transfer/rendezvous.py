"""Rendezvous: key-value store through which ranks form links and process groups."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from grpc import RpcError
from torch.distributed import DistStoreError, Store

from core.rpc import transfer_pb2 as pb
from core.rpc import transfer_pb2_grpc as rpc
from core.types.errors import CapacityError

_MAX_KEYS = 4096  # a gang and its connecting links need some hundreds, for seconds


@dataclass(eq=False)
class _Entry:
    value: Future[bytes] = field(default_factory=Future)
    num_waiting: int = 0


class Rendezvous:
    """Key-value store of one rank, used by any thread here and by other ranks over gRPC.

    An unset key is removed with its last waiter. When the store is full, the oldest set keys are evicted.
    """

    def __init__(self, *, max_keys: int = _MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of keys that are set or waited for."""
        with self._lock:
            return len(self._entries)

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            if key not in self._entries or self._entries[key].value.done():
                self._entries[key] = _Entry()
            self._entries.move_to_end(key)
            self._entries[key].value.set_result(value)
            if len(self._entries) > self._max_keys:
                self._evict_oldest()

    def get(self, key: str, *, timeout_s: float) -> bytes:
        """Wait for the value of `key`. Raises TimeoutError, and CapacityError if the store is full of unset keys."""
        with self._waiting(key) as value:
            return value.result(timeout_s)

    async def get_async(self, key: str) -> bytes:
        with self._waiting(key) as value:
            # Shielded, because other callers wait for the same future.
            return await asyncio.shield(asyncio.wrap_future(value))

    def forget(self, prefix: str) -> None:
        with self._lock:
            for key in [key for key in self._entries if key.startswith(prefix)]:
                del self._entries[key]

    @contextmanager
    def _waiting(self, key: str) -> Iterator[Future[bytes]]:
        with self._lock:
            if key not in self._entries and len(self._entries) >= self._max_keys:
                self._evict_oldest()
            entry = self._entries.setdefault(key, _Entry())
            entry.num_waiting += 1
        try:
            yield entry.value
        finally:
            with self._lock:
                entry.num_waiting -= 1
                if not (entry.num_waiting or entry.value.done()) and self._entries.get(key) is entry:
                    del self._entries[key]

    def _evict_oldest(self) -> None:
        oldest = next((key for key, entry in self._entries.items() if entry.value.done()), None)
        if oldest is None:
            raise CapacityError(f"rendezvous store full: {len(self._entries)} keys pending")
        del self._entries[oldest]


class RendezvousStore(Store):
    """Adapter from a rendezvous to torch.distributed's Store.

    Replaces torch's TCPStore, which resolves every peer's address by name: with a slow or failing name server each link
    waits for it (measured: 5 s per lost answer). Operations raise DistStoreError.
    """

    def __init__(
        self, set_value: Callable[[str, bytes], None], get_value: Callable[[str, float], bytes], *, timeout_s: float
    ) -> None:
        super().__init__()
        self._set_value = set_value
        self._get_value = get_value
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        self._set_value(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        return self._wait(key, self._timeout_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._wait(key, timeout.total_seconds() if timeout else self._timeout_s)

    def check(self, keys: list[str]) -> bool:
        """Return False. Only the watchdog of an NCCL group calls this, for keys that no rank of ours sets."""
        return False

    def _wait(self, key: str, timeout_s: float) -> bytes:
        try:
            return self._get_value(key, timeout_s)
        except (TimeoutError, RpcError, CapacityError) as error:
            raise DistStoreError(f"key {key!r} was not set within {timeout_s} s") from error


def local_store(rendezvous: Rendezvous, *, timeout_s: float) -> Store:
    """Return the store for the rank that owns the rendezvous."""
    return RendezvousStore(
        rendezvous.set, lambda key, seconds: rendezvous.get(key, timeout_s=seconds), timeout_s=timeout_s
    )


def remote_store(stub: rpc.RankStub, loop: asyncio.AbstractEventLoop, *, timeout_s: float) -> Store:
    """Return the store for another rank. `stub` belongs to `loop`; use the store from any other thread."""

    async def set_remote(key: str, value: bytes) -> None:
        await stub.Tell(pb.TellRequest(key=key, value=value), timeout=timeout_s, wait_for_ready=True)

    async def get_remote(key: str, seconds: float) -> bytes:
        reply: pb.AskReply = await stub.Ask(pb.AskRequest(key=key), timeout=seconds, wait_for_ready=True)
        return reply.value

    return RendezvousStore(
        lambda key, value: asyncio.run_coroutine_threadsafe(set_remote(key, value), loop).result(timeout_s + 1),
        lambda key, seconds: asyncio.run_coroutine_threadsafe(get_remote(key, seconds), loop).result(seconds + 1),
        timeout_s=timeout_s,
    )
