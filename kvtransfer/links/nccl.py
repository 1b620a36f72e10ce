"""Links over NCCL, between GPUs."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from core.types.errors import LinkClosed
from engine.runner.streams import Event
from kvtransfer.links.link import LinkEnd, Operation, Waiting, own_stream, stream_event
from kvtransfer.links.nccl_library import Nccl, NcclError, loaded_nccl

# GPU memory that a two-rank communicator takes on each side: NCCL 2.28.9 on an H100, docs/benchmarks/gpu.md.
NCCL_BYTES = 140 << 20
_SENDER, _RECEIVER = 0, 1
_POLL_S = 5e-5
_ASK_S = 0.2
_MAX_THREADS = 2048  # includes threads that hang in NCCL
_READY, _ID = "ready", "id"  # store keys: set by the receiving end first, then by the sending end


class NcclLink:
    """Link over a two-rank communicator. Ranks on one GPU need distinct NCCL host ids (guide_nccl).

    A dedicated thread creates the communicator, makes all NCCL calls and ends it, so a hanging call cannot block the
    link's user, who waits for this thread with a deadline. An operation waits for the work on its caller's current
    stream and runs on the link's own stream. After a missed deadline or `close` the communicator is aborted, which also
    ends its kernels; payloads are referenced until then.
    """

    backend = "nccl"
    num_buffers = 2

    def __init__(self, end: LinkEnd, *, nccl: Nccl | None = None, abort_s: float = 1.0) -> None:
        """abort_s: time for a NCCL call to return before another thread aborts it."""
        self.device = end.device
        self._abort_s = abort_s
        self._end = end
        self._nccl = nccl or loaded_nccl()
        self._todo: queue.SimpleQueue[tuple[Tensor, Event] | None] = queue.SimpleQueue()
        self._num_started = 0  # used by the caller's thread only
        self._launching: Tensor | None = None  # payload being passed to NCCL; used by the link's thread only
        # Guards the fields below and notifies of their changes.
        self._changed = threading.Condition()
        self._num_done = 0
        self._failure: LinkClosed | None = None
        self._has_met = False
        self._has_ended = True  # the link's thread is not running
        self._communicator: int | None = None  # the thread that takes it from this field aborts it

    def meet(self) -> None:
        self._check_open()
        if not thread_places().acquire(blocking=False):
            raise LinkClosed(f"nccl: limit of {_MAX_THREADS} links reached, some may hang: restart this replica")
        self._has_ended = False
        threading.Thread(target=self._run, name="kv-nccl", daemon=True).start()
        self._wait(lambda: self._has_met, self._end.timeout_s, "meeting the peer")

    def send(self, payload: Tensor) -> Operation:
        return self._start(payload)

    def recv(self, payload: Tensor) -> Operation:
        return self._start(payload)

    def close(self) -> None:
        self._fail(LinkClosed("the link is closed"))

    def _start(self, payload: Tensor) -> Operation:
        self._check_open()
        self._num_started += 1
        number = self._num_started
        self._todo.put((payload, stream_event(self.device)))
        return Waiting(lambda timeout_s: self._wait(lambda: self._num_done >= number, timeout_s, "an operation"))

    def _wait(self, condition: Callable[[], bool], timeout_s: float, operation: str) -> None:
        with self._changed:
            is_over = self._changed.wait_for(lambda: self._failure is not None or condition(), timeout_s)
        if not is_over:
            self._fail(LinkClosed(f"nccl: {operation} timed out after {timeout_s:.1f} s"))
        self._check_open()

    def _check_open(self) -> None:
        if self._failure:
            raise LinkClosed(str(self._failure))

    def _fail(self, error: LinkClosed) -> None:
        """Fail the link: wake all waiting threads and end the link's thread. Thread-safe; the first error wins."""
        with self._changed:
            if self._failure:
                return
            self._failure = error
            self._changed.notify_all()
            may_hang = self._communicator is not None
        self._todo.put(None)
        if may_hang:
            threading.Thread(target=self._abort_if_stuck, name="kv-nccl-abort", daemon=True).start()

    def _abort_if_stuck(self) -> None:
        """Wait briefly for the link's thread to end; if it hangs in NCCL, abort the communicator."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or self._communicator is None, self._abort_s)
        self._abort()

    def _abort(self) -> None:
        with self._changed:
            communicator, self._communicator = self._communicator, None
        if communicator is not None:
            self._nccl.abort(communicator)

    # On the link's own thread.

    def _run(self) -> None:
        try:
            is_cuda = self.device.type == "cuda"
            on_device: AbstractContextManager[object] = torch.cuda.device(self.device) if is_cuda else nullcontext()
            with on_device, own_stream(self.device) as stream:
                self._work(stream)
        except Exception as error:  # thread boundary: waiting threads must see the error
            self._fail(LinkClosed(f"nccl: {error}"))
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()
            thread_places().release()

    def _work(self, stream: int) -> None:
        under_way: deque[tuple[Tensor, Event]] = deque()
        try:
            self._init()
            greeting = torch.zeros(1, dtype=torch.uint8, device=self.device)
            under_way.append(self._launch(greeting, stream_event(self.device), stream))
            self._poll_until(lambda: under_way[0][1].is_over)
            under_way.clear()
            with self._changed:
                self._has_met = True
                self._changed.notify_all()
            self._serve(under_way, stream)
        except (NcclError, LinkClosed, RuntimeError) as error:  # RuntimeError: the store's, and CUDA's
            self._fail(LinkClosed(f"nccl: {error}"))
        finally:
            self._abort()
            # Until the stream is idle, the device may write to payloads in flight or being launched.
            stream_event(self.device).wait()
            self._launching = None

    def _init(self) -> None:
        """Create the communicator.

        The sending end creates the id once the receiving end is ready, so that NCCL never listens for a missing peer.
        """
        store = PrefixStore(self._end.prefix, self._end.store)
        if not self._end.is_sender:
            store.set(_READY, "")
            self._init_rank(self._poll_store(store, _ID), rank=_RECEIVER)
            return
        self._poll_store(store, _READY)
        id = self._nccl.new_id()
        try:
            store.set(_ID, id)  # type: ignore[arg-type]  # torch's stubs lack bytes
            self._init_rank(id, rank=_SENDER)
        except Exception:
            self._nccl.dismiss(id)
            raise

    def _poll_store(self, store: PrefixStore, key: str) -> bytes:
        """Poll the store for `key`, because a store wait cannot be interrupted. Raises LinkClosed, or RuntimeError."""
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

    def _init_rank(self, id: bytes, *, rank: int) -> None:
        self._check_open()
        communicator = self._nccl.begin(id, rank=rank)
        with self._changed:
            self._communicator = communicator
        self._poll_until(lambda: self._nccl.is_ready(communicator))

    def _serve(self, under_way: deque[tuple[Tensor, Event]], stream: int) -> None:
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
                self._nccl.is_ready(communicator)  # raises if the peer is gone
                time.sleep(_POLL_S)

    def _launch(self, payload: Tensor, before: Event, stream: int) -> tuple[Tensor, Event]:
        """Launch an operation that waits for `before`. Returns its payload and its completion event."""
        communicator = self._communicator
        if communicator is None:
            raise LinkClosed("the link is closed")
        before.hold_up()
        self._launching = payload
        if self._end.is_sender:
            self._nccl.send(communicator, payload.data_ptr(), payload.numel(), to=_RECEIVER, stream=stream)
        else:
            self._nccl.recv(communicator, payload.data_ptr(), payload.numel(), of=_SENDER, stream=stream)
        self._poll_until(lambda: self._nccl.is_ready(communicator))
        self._launching = None
        return payload, stream_event(self.device)

    def _poll_until(self, condition: Callable[[], bool]) -> None:
        """Poll until the condition holds. Raises LinkClosed if the link is closed meanwhile."""
        self._check_open()
        while not condition():
            time.sleep(_POLL_S)
            self._check_open()


@lru_cache(maxsize=1)
def thread_places() -> threading.BoundedSemaphore:
    """Return the process-wide limit on link threads. A hanging thread keeps its slot, so leaks are bounded."""
    return threading.BoundedSemaphore(_MAX_THREADS)
