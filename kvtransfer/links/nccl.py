"""Links over NCCL: between GPUs."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from core.types.errors import LinkClosed
from kvtransfer.links.device_stream import StreamEvent, own_stream
from kvtransfer.links.link import LinkEnd, Operation
from kvtransfer.links.nccl_library import Nccl, NcclError, loaded_nccl

# What a communicator of two ranks takes of each one's GPU: NCCL 2.28.9 on an H100, docs/benchmarks/kv_path.md.
NCCL_BYTES = 140 << 20
_SENDER, _RECEIVER = 0, 1
_POLL_S = 5e-5
_ASK_S = 0.2
_ABORT_S = 1.0  # for a call to NCCL to end by itself before it is aborted from beside
_MAX_THREADS = 2048  # those that hang in NCCL for good included
_READY, _ID = "ready", "id"  # the receiving end's word in the store, and then the sending one's


class NcclLink:
    """A communicator of two ranks, each on a GPU of its own, or on two hosts as NCCL is told (guide_nccl).

    One thread makes it, calls NCCL and ends it; so no call of NCCL's can hold up whoever uses the link, who waits for
    this thread, with a deadline. An operation comes behind what its thread has started on its current stream, and works
    on a stream of the link's own (kvtransfer/links/device_stream.py). Where a deadline has passed, or `close` was
    called, the communicator is aborted, which ends what is on the device as well; a payload is held until that has let
    go of it.
    """

    backend = "nccl"
    num_buffers = 2

    def __init__(self, end: LinkEnd, *, nccl: Nccl | None = None) -> None:
        self.device = end.device
        self._end = end
        self._nccl = nccl or loaded_nccl()
        self._todo: queue.SimpleQueue[tuple[Tensor, StreamEvent] | None] = queue.SimpleQueue()
        self._num_started = 0  # belongs to the thread that uses the link
        self._launching: Tensor | None = None  # what NCCL is given right now; belongs to the link's thread
        # Under this lock, and told by it:
        self._changed = threading.Condition()
        self._num_done = 0
        self._failure: LinkClosed | None = None
        self._has_met = False
        self._has_ended = True  # the link's thread; it has not begun
        self._communicator: int | None = None  # to be aborted, by whoever takes it from here

    def meet(self) -> None:
        self._check_open()
        if not thread_places().acquire(blocking=False):
            raise LinkClosed(f"{_MAX_THREADS} links over NCCL are here already, or hang: restart this replica")
        self._has_ended = False
        threading.Thread(target=self._run, name="kv-nccl", daemon=True).start()
        self._wait(lambda: self._has_met, timeout_s=self._end.timeout_s, what="meeting the peer")

    def send(self, payload: Tensor) -> Operation:
        return self._start(payload)

    def recv(self, payload: Tensor) -> Operation:
        return self._start(payload)

    def close(self) -> None:
        self._fail(LinkClosed("the link is closed"))

    def wait_for(self, number: int, *, timeout_s: float) -> None:
        """Until so many operations have ended. Raises LinkClosed."""
        self._wait(lambda: self._num_done >= number, timeout_s=timeout_s, what="an operation")

    def _start(self, payload: Tensor) -> Operation:
        self._check_open()
        self._num_started += 1
        self._todo.put((payload, StreamEvent(self.device)))
        return _NcclOperation(self, self._num_started)

    def _wait(self, is_so: Callable[[], bool], *, timeout_s: float, what: str) -> None:
        with self._changed:
            is_over = self._changed.wait_for(lambda: self._failure is not None or is_so(), timeout_s)
        if not is_over:
            self._fail(LinkClosed(f"nccl: {what} took longer than {timeout_s:.1f} s"))
        self._check_open()

    def _check_open(self) -> None:
        if self._failure:
            raise LinkClosed(str(self._failure))

    def _fail(self, error: LinkClosed) -> None:
        """Wake whoever waits, and have it end. From any thread; the first error counts."""
        with self._changed:
            if self._failure:
                return
            self._failure = error
            self._changed.notify_all()
            may_hang = self._communicator is not None
        self._todo.put(None)
        if may_hang:
            threading.Thread(target=self._end_from_beside, name="kv-nccl-abort", daemon=True).start()

    def _end_from_beside(self) -> None:
        """The link's thread ends by itself, unless a call to NCCL hangs: that ends when it is aborted."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or self._communicator is None, _ABORT_S)
        self._abort()

    def _abort(self) -> None:
        with self._changed:
            communicator, self._communicator = self._communicator, None
        if communicator is not None:
            self._nccl.abort(communicator)

    # On the link's own thread.

    def _run(self) -> None:
        try:
            with _on(self.device), own_stream(self.device) as stream:
                self._work(stream)
        except Exception as error:  # the edge of this thread: whoever waits must hear of it
            self._fail(LinkClosed(f"nccl: {error}"))
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()
            thread_places().release()

    def _work(self, stream: int) -> None:
        under_way: deque[tuple[Tensor, StreamEvent]] = deque()
        try:
            self._make()
            greeting = torch.zeros(1, dtype=torch.uint8, device=self.device)
            under_way.append(self._launch(greeting, StreamEvent(self.device), stream))
            self._until(lambda: under_way[0][1].is_over)
            under_way.clear()
            with self._changed:
                self._has_met = True
                self._changed.notify_all()
            self._serve(under_way, stream)
        except (NcclError, LinkClosed, RuntimeError) as error:  # RuntimeError: the store's, and CUDA's
            self._fail(LinkClosed(f"nccl: {error}"))
        finally:
            self._abort()
            # Until then the device may write to what is under way, and to what NCCL was given and has said nothing of.
            StreamEvent(self.device).wait()
            self._launching = None

    def _make(self) -> None:
        """The sending end makes the id when the receiving one is there: nobody listens for a peer that never comes."""
        store = PrefixStore(self._end.prefix, self._end.store)
        if not self._end.is_sender:
            store.set(_READY, "")
            self._become(self._asked(store, _ID), rank=_RECEIVER)
            return
        self._asked(store, _READY)
        id = self._nccl.new_id()
        try:
            store.set(_ID, id)  # type: ignore[arg-type]  # torch's stubs know no bytes
            self._become(id, rank=_SENDER)
        except Exception:
            self._nccl.dismiss(id)
            raise

    def _asked(self, store: PrefixStore, key: str) -> bytes:
        """Again and again, because nothing wakes who waits for a store. Raises LinkClosed, or what the store does."""
        until = time.monotonic() + self._end.timeout_s
        while True:
            asked_at = time.monotonic()
            try:
                store.wait([key], timedelta(seconds=_ASK_S))
                return store.get(key)
            except RuntimeError:
                self._check_open()
                if asked_at > until:
                    raise
                time.sleep(max(0.0, asked_at + _ASK_S - time.monotonic()))

    def _become(self, id: bytes, *, rank: int) -> None:
        self._check_open()
        communicator = self._nccl.begin(id, rank=rank)
        with self._changed:
            self._communicator = communicator
        self._until(lambda: self._nccl.is_ready(communicator))

    def _serve(self, under_way: deque[tuple[Tensor, StreamEvent]], stream: int) -> None:
        communicator = self._communicator
        while communicator is not None:
            self._check_open()
            if not under_way or not self._todo.empty():
                if (job := self._todo.get()) is None:
                    return
                under_way.append(self._launch(*job, stream))
            elif under_way[0][1].is_over:
                under_way.popleft()
                with self._changed:
                    self._num_done += 1
                    self._changed.notify_all()
            else:
                self._nccl.is_ready(communicator)  # raises for a peer that is gone
                time.sleep(_POLL_S)

    def _launch(self, payload: Tensor, before: StreamEvent, stream: int) -> tuple[Tensor, StreamEvent]:
        """Give an operation to the device; it comes behind `before`. Returns what it holds, and its own end."""
        communicator = self._communicator
        if communicator is None:
            raise LinkClosed("the link is closed")
        before.hold_up()
        self._launching = payload
        if self._end.is_sender:
            self._nccl.send(communicator, payload.data_ptr(), payload.numel(), to=_RECEIVER, stream=stream)
        else:
            self._nccl.recv(communicator, payload.data_ptr(), payload.numel(), of=_SENDER, stream=stream)
        self._until(lambda: self._nccl.is_ready(communicator))
        self._launching = None
        return payload, StreamEvent(self.device)

    def _until(self, is_so: Callable[[], bool]) -> None:
        """Look again and again. Raises LinkClosed when the link is closed meanwhile."""
        self._check_open()
        while not is_so():
            time.sleep(_POLL_S)
            self._check_open()


class _NcclOperation:
    def __init__(self, link: NcclLink, number: int) -> None:
        self._link = link
        self._number = number

    def wait(self, *, timeout_s: float) -> None:
        self._link.wait_for(self._number, timeout_s=timeout_s)


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """The calling thread's device."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield


@lru_cache(maxsize=1)
def thread_places() -> threading.BoundedSemaphore:
    """Of this process: links that hang in NCCL keep theirs, and so at last nobody makes more of them."""
    return threading.BoundedSemaphore(_MAX_THREADS)
