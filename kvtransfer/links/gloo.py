"""Links over Gloo (TCP), for hosts without GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Work

from core.types.errors import LinkClosed
from kvtransfer.links.link import LinkEnd, Operation, Waiting

_Gloo: Any = ProcessGroupGloo  # torch's stubs lack its options, send and recv
_SENDER, _RECEIVER = 0, 1
_TAG = 0


class GlooLink:
    """Link over a process group of two, created directly on a store without a world, so that ranks may join and leave.

    When a peer dies (measured, torch 2.13), an idle receive fails in milliseconds, but an operation in progress waits
    for its timeout and cannot be interrupted. So every operation has a deadline. A caller that detects the loss earlier
    calls `close` and does not join the thread that is stuck in the operation.
    """

    backend = "gloo"
    device = torch.device("cpu")
    num_buffers = 2  # one on the wire while the other is packed or written; a third gained nothing

    def __init__(self, end: LinkEnd) -> None:
        self._end = end
        self._peer = _RECEIVER if end.is_sender else _SENDER
        self._closed = threading.Event()
        self._group: Any = None

    def meet(self) -> None:
        """Connect to the peer. Gloo cannot be interrupted: `close` takes effect once it returns or times out."""
        if self._closed.is_set():
            raise LinkClosed("the link is closed")
        end = self._end
        options = _Gloo._Options()
        options._timeout = timedelta(seconds=end.timeout_s)
        options._threads = 1
        options._devices = [_device(end.host)]
        try:
            rank = _SENDER if end.is_sender else _RECEIVER
            self._group = _Gloo(PrefixStore(end.prefix, end.store), rank, 2, options)
        except RuntimeError as error:
            self._closed.set()
            raise LinkClosed(f"link {end.prefix}: peer did not connect: {error}") from error
        if self._closed.is_set():
            raise LinkClosed("the link was closed while connecting")

    def send(self, payload: Tensor) -> Operation:
        return self._start(lambda: self._group.send([payload], self._peer, _TAG))

    def recv(self, payload: Tensor) -> Operation:
        return self._start(lambda: self._group.recv([payload], self._peer, _TAG))

    def close(self) -> None:
        self._closed.set()

    def _start(self, start: Callable[[], Work]) -> Operation:
        if self._closed.is_set():
            raise LinkClosed("the link is closed")
        with self._closing_on_error():
            work = start()
        return Waiting(lambda timeout_s: self._wait(work, timeout_s))

    def _wait(self, work: Work, timeout_s: float) -> None:
        with self._closing_on_error():
            work.wait(timedelta(seconds=timeout_s))
        if self._closed.is_set():
            raise LinkClosed("the link was closed during the operation")

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._closed.set()
            raise LinkClosed(f"gloo: {error}") from error


@lru_cache(maxsize=4)
def _device(host: str) -> Any:
    """Return the process-wide Gloo device, which owns the thread that polls the links' sockets."""
    return _Gloo.create_device(hostname=host)
