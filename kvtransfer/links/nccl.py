"""Links over NCCL: between GPUs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Work

from cluster.words.errors import LinkClosed
from kvtransfer.links.link import LinkEnd, Operation

# What a communicator of two ranks takes of each one's GPU: an estimate, from its buffers of 4 MiB for each channel and
# protocol. `python -m tests.benchmarks.gpu_memory links` measures it.
NCCL_BYTES = 100 << 20
_SENDER, _RECEIVER = 0, 1
_POLL_S = 5e-5  # torch's own wait looks once in a millisecond, in which a fast link moves many payloads
_ABORT_S = 5.0  # for an operation to end that was aborted


class NcclLink:
    """A communicator of two ranks, each on a GPU of its own (NCCL allows no two ranks on one).

    An operation comes behind what its thread has started on its current stream (kvtransfer/movers/lane.py). Its end is
    waited for on the host, so that the deadline holds: when that has passed, or when `close` is called, the
    communicator is aborted, which ends the operation.
    """

    backend = "nccl"
    num_buffers = 2

    def __init__(self, end: LinkEnd) -> None:
        from torch.distributed import ProcessGroupNCCL  # in CUDA builds of torch only

        # Torch reads this when it makes a group, and then has no thread watch it. Such a thread would end this process
        # where a peer dies or an operation takes longer than the group's timeout. A gang's own group, for whose
        # operations the host must not wait, is there before any link (engine/parallel.py).
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        self.device = end.device
        self._store = end.store  # the group keeps only the C++ half of a store that is written in Python
        self._peer = _RECEIVER if end.is_sender else _SENDER
        self._closed = threading.Event()
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=end.timeout_s)
        rank = _SENDER if end.is_sender else _RECEIVER
        # Any: torch's stubs know neither send nor recv.
        self._group: Any = ProcessGroupNCCL(PrefixStore(end.prefix, end.store), rank, 2, options)
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
            with torch.cuda.device(self.device):
                return _NcclOperation(self, start())
        except RuntimeError as error:
            self.close()
            raise LinkClosed(f"nccl: {error}") from error

    def finish(self, work: Work, *, timeout_s: float) -> None:
        """Wait on the host for something that was started here. Raises LinkClosed."""
        try:
            with torch.cuda.device(self.device):
                is_over = _poll(work, timeout_s)
                if not is_over:
                    self.close()
                    _poll(work, _ABORT_S)  # its payload must not be used for anything else before
                    raise LinkClosed(f"nccl: an operation took longer than {timeout_s:.1f} s")
                if not self._closed.is_set():
                    work.wait(timedelta(seconds=timeout_s))  # it is over: this raises what went wrong
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


def _poll(work: Work, timeout_s: float) -> bool:
    """Whether it has ended, in whatever way, before the time has passed."""
    deadline = time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
