"""Where ranks that want to form a process group leave word for each other."""

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

_MAX_WORDS = 4096  # a gang and the links that are being made leave some hundreds, for seconds


@dataclass(eq=False)
class _Word:
    told: Future[bytes] = field(default_factory=Future)
    num_waiting: int = 0


class Rendezvous:
    """Keys and values of one rank, told and asked for by any thread here, and by other ranks over its gRPC service.

    A word that nobody has told goes with the last who asks for it. Of those that were told the oldest make room.
    """

    def __init__(self, *, max_words: int = _MAX_WORDS) -> None:
        self._max_words = max_words
        self._lock = threading.Lock()
        self._words: OrderedDict[str, _Word] = OrderedDict()

    def __len__(self) -> int:
        """Words that were told or are asked for."""
        with self._lock:
            return len(self._words)

    def tell(self, key: str, value: bytes) -> None:
        with self._lock:
            if key not in self._words or self._words[key].told.done():
                self._words[key] = _Word()
            self._words.move_to_end(key)
            self._words[key].told.set_result(value)
            if len(self._words) > self._max_words:
                self._forget_oldest()

    def ask(self, key: str, *, timeout_s: float) -> bytes:
        """Wait for what is told under `key`. Raises TimeoutError, and CapacityError where too much is waited for."""
        with self._waiting(key) as told:
            return told.result(timeout_s)

    async def ask_async(self, key: str) -> bytes:
        with self._waiting(key) as told:
            return await asyncio.shield(asyncio.wrap_future(told))  # others wait for the same word

    def forget(self, prefix: str) -> None:
        with self._lock:
            for key in [key for key in self._words if key.startswith(prefix)]:
                del self._words[key]

    @contextmanager
    def _waiting(self, key: str) -> Iterator[Future[bytes]]:
        with self._lock:
            if key not in self._words and len(self._words) >= self._max_words:
                self._forget_oldest()
            word = self._words.setdefault(key, _Word())
            word.num_waiting += 1
        try:
            yield word.told
        finally:
            with self._lock:
                word.num_waiting -= 1
                if not (word.num_waiting or word.told.done()) and self._words.get(key) is word:
                    del self._words[key]

    def _forget_oldest(self) -> None:
        oldest = next((key for key, word in self._words.items() if word.told.done()), None)
        if oldest is None:
            raise CapacityError(f"{len(self._words)} words are waited for, and none of them was told")
        del self._words[oldest]


class RendezvousStore(Store):
    """A meeting as torch.distributed wants to see it.

    Not torch's TCPStore: that one looks up the name of every peer's address, and where the name server is slow or
    does not answer, each link waits for it (measured: 5 s per lost answer). Operations raise DistStoreError.
    """

    def __init__(
        self, tell: Callable[[str, bytes], None], ask: Callable[[str, float], bytes], *, timeout_s: float
    ) -> None:
        super().__init__()
        self._tell = tell
        self._ask = ask
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        self._tell(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        return self._wait(key, self._timeout_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._wait(key, timeout.total_seconds() if timeout else self._timeout_s)

    def check(self, keys: list[str]) -> bool:
        """Whether all are there. Only what watches over an NCCL group asks, once a second: for words that no rank of
        ours leaves."""
        return False

    def _wait(self, key: str, timeout_s: float) -> bytes:
        try:
            return self._ask(key, timeout_s)
        except (TimeoutError, RpcError, CapacityError) as error:
            raise DistStoreError(f"nobody came for {key} within {timeout_s} s") from error


def local_store(rendezvous: Rendezvous, *, timeout_s: float) -> Store:
    """The store as the rank sees it that holds the meeting."""
    return RendezvousStore(
        rendezvous.tell, lambda key, seconds: rendezvous.ask(key, timeout_s=seconds), timeout_s=timeout_s
    )


def remote_store(stub: rpc.RankStub, loop: asyncio.AbstractEventLoop, *, timeout_s: float) -> Store:
    """The store as another rank sees it. `stub` belongs to `loop`; the store is used from any other thread."""

    async def tell(key: str, value: bytes) -> None:
        await stub.Tell(pb.TellRequest(key=key, value=value), timeout=timeout_s, wait_for_ready=True)

    async def ask(key: str, seconds: float) -> bytes:
        reply: pb.AskReply = await stub.Ask(pb.AskRequest(key=key), timeout=seconds, wait_for_ready=True)
        return reply.value

    def report_now(key: str, value: bytes) -> None:
        asyncio.run_coroutine_threadsafe(tell(key, value), loop).result(timeout_s + 1)

    def ask_now(key: str, seconds: float) -> bytes:
        return asyncio.run_coroutine_threadsafe(ask(key, seconds), loop).result(seconds + 1)

    return RendezvousStore(report_now, ask_now, timeout_s=timeout_s)
