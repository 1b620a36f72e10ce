"""Links over NCCL: between GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Work

from cluster.errors import LinkClosed
from kvtransfer.link import LinkEnd, Operation

_SENDER, _RECEIVER = 0, 1


class NcclLink:
    """A communicator of two ranks, each on a GPU of its own (NCCL allows no two ranks on one).

    Each operation runs on a stream of this link and is waited for on the host, so that its deadline holds: a wait with
    a timeout polls the communicator and aborts it when the time has passed. `close` aborts it from outside, which
    wakes the waiting thread.
    """

    backend = "nccl"
    num_buffers = 2

    def __init__(self, end: LinkEnd) -> None:
        from torch.distributed import ProcessGroupNCCL  # in CUDA builds of torch only

        self.device = end.device
        self._store = end.store  # the group keeps only the C++ half of a store that is written in Python
        self._peer = _RECEIVER if end.is_sender else _SENDER
        self._closed = threading.Event()
        self._stream = torch.cuda.Stream(end.device)
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=end.timeout_s)
        rank = _SENDER if end.is_sender else _RECEIVER
        self._group = ProcessGroupNCCL(PrefixStore(end.prefix, end.store), rank, 2, options)
        self._meet(end.timeout_s)

    def send(self, payload: Tensor) -> Operation:
        return self._start(lambda: self._group.send([payload], self._peer, 0))

    def recv(self, payload: Tensor) -> Operation:
        return self._start(lambda: self._group.recv([payload], self._peer, 0))

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            threading.Thread(target=self._group.abort, name="nccl-abort", daemon=True).start()

    def _meet(self, timeout_s: float) -> None:
        """NCCL makes the communicator at the first operation: do one, so that meeting has its own deadline."""
        greeting = torch.zeros(1, dtype=torch.uint8, device=self.device)
        if self._peer == _RECEIVER:
            self.send(greeting).wait(timeout_s=timeout_s)
        else:
            self.recv(greeting).wait(timeout_s=timeout_s)

    def _start(self, start: Callable[[], Work]) -> Operation:
        if self._closed.is_set():
            raise LinkClosed("the link is closed")
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                self._stream.wait_stream(torch.cuda.default_stream(self.device))
                return _NcclOperation(self, start())
        except RuntimeError as error:
            self.close()
            raise LinkClosed(f"nccl: {error}") from error

    def finish(self, work: Work, *, timeout_s: float) -> None:
        """Wait on the host for something that was started here. Raises LinkClosed."""
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                work.wait(timedelta(seconds=timeout_s))
                self._stream.synchronize()
        except RuntimeError as error:
            self.close()
            raise LinkClosed(f"nccl: {error}") from error
        if self._closed.is_set():
            raise LinkClosed("the link was closed meanwhile")


class _NcclOperation:
    def __init__(self, link: NcclLink, work: Work) -> None:
        self._link = link
        self._work = work

    def wait(self, *, timeout_s: float) -> None:
        self._link.finish(self._work, timeout_s=timeout_s)
