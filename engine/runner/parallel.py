"""Tensor parallelism between the ranks of one replica; each holds a share of every layer."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import AllreduceOptions, PrefixStore, ReduceOp, Store

from core.types.errors import ReplicaLost

Ints = NDArray[np.int64]

# Timeout of an operation: well above a step of the slowest rank. A dead rank is usually detected long before.
OPERATION_S = 30.0
# Limit of a broadcast; a step of 64 sequences of a million tokens takes 2**22.
_MAX_NUMBERS = 1 << 26
# int64 numbers in the first message of a broadcast, enough for a decode step of a few dozen sequences.
_FRAME = 512


class TensorParallel:
    """Place of this rank among `size` ranks, and its collective operations.

    A single rank does nothing and needs no network. Ranks call the same operations in the same order, each from one
    thread. If a rank dies, the others raise ReplicaLost within `timeout_s`; the group is unusable afterwards.
    Operations replayed from a CUDA graph (decode_graphs.py) have no such bound. Broadcasts of control messages use
    Gloo; device tensors use NCCL on GPUs.
    """

    def __init__(self, *, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        # Keep this reference: a PrefixStore does not keep a store written in Python alive.
        self._root: Store | None = None
        self._store: Store | None = None
        self._control: Any = None
        self._compute: Any = None

    @classmethod
    def join(
        cls,
        store: Store,
        *,
        prefix: str,
        rank: int,
        size: int,
        host: str,
        device: torch.device,
        meet_s: float,
        timeout_s: float = OPERATION_S,
    ) -> TensorParallel:
        """Meet the other ranks over `store`. Returns when all have joined, or raises ReplicaLost after `meet_s`.

        `prefix` names this gang in the store. `host` is this rank's own address, which the others connect to.
        `timeout_s` bounds each later operation.
        """
        parallel = cls(rank=rank, size=size)
        if size == 1:
            return parallel
        parallel._root = store
        parallel._store = PrefixStore(prefix, store)
        parallel.wait_for_all("come", timeout_s=meet_s)
        timeout = timedelta(seconds=timeout_s)
        try:
            parallel._control = _gloo(PrefixStore("control", parallel._store), rank, size, host, timeout)
            parallel._compute = parallel._control
            if device.type == "cuda":
                parallel._compute = _nccl(PrefixStore("compute", parallel._store), rank, size, timeout)
        except RuntimeError as error:
            raise ReplicaLost(f"rank {rank}: not all {size} ranks came together: {error}") from error
        return parallel

    def wait_for_all(self, stage: str, *, timeout_s: float) -> None:
        """Wait until every rank has reached `stage`. Raises ReplicaLost after timeout_s."""
        if self._store is None:
            return
        self._store.set(f"{stage}/{self.rank}", "")
        try:
            keys = [f"{stage}/{rank}" for rank in range(self.size)]
            self._store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise ReplicaLost(
                f"rank {self.rank}: not all {self.size} ranks were there ({stage}) in {timeout_s} s"
            ) from error

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def span(self, total: int) -> tuple[int, int]:
        """Return this rank's share [start, end) of `total` items; shares differ by one at most."""
        return total * self.rank // self.size, total * (self.rank + 1) // self.size

    def least(self, number: int) -> int:
        """Return the minimum over the ranks' numbers. On the host."""
        if self.size == 1:
            return number
        numbers, options = torch.tensor([number]), cast(Any, AllreduceOptions())
        options.reduceOp = ReduceOp.MIN
        self._run(lambda: self._control.allreduce([numbers], options))
        return int(numbers)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks in place; every rank gets the same bits."""
        if self.size > 1:
            self._run(lambda: self._compute.allreduce([x]))
        return x

    def all_gather(self, x_RV: Tensor, total: int) -> Tensor:
        """Concatenate the ranks' spans of the last dimension: (R, share) on each -> (R, total) on each."""
        if self.size == 1:
            return x_RV
        # Shares may differ in width by one, but collectives need equal ones.
        width = -(-total // self.size)
        padded = torch.nn.functional.pad(x_RV, (0, width - x_RV.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._run(lambda: self._compute.allgather([parts], [padded]))
        bounds = [total * rank // self.size for rank in range(self.size + 1)]
        widths = [end - start for start, end in pairwise(bounds)]
        return torch.cat([part[..., :share] for part, share in zip(parts, widths, strict=True)], dim=-1)

    def all_to_all(self, x_N: Tensor, to_each: list[int], from_each: list[int]) -> Tensor:
        """Send each rank its part of the first dimension; return the parts received, in rank order. Any dtype.

        to_each, from_each: length of the part sent to, and received from, every rank.
        """
        if self.size == 1:
            return x_N
        row_bytes = x_N.new_empty(1, *x_N.shape[1:]).nbytes
        received = x_N.new_empty(sum(from_each), *x_N.shape[1:])
        sent, got = (t.contiguous().view(-1).view(torch.uint8) for t in (x_N, received))
        splits = [[count * row_bytes for count in counts] for counts in (from_each, to_each)]
        self._run(lambda: self._compute.alltoall_base(got, sent, *splits))
        return received

    def broadcast(self, numbers: Ints | None = None) -> Ints:
        """Send rank 0's array (int64, flat) to every rank; the others pass None.

        The others wait at most the group's timeout, so an idle rank 0 must broadcast at shorter intervals.
        """
        assert (numbers is not None) == self.is_leader
        if self.size == 1 and numbers is not None:
            return numbers
        # The first message holds the length and the first numbers; a second one holds the rest, if any.
        frame = torch.zeros(_FRAME, dtype=torch.int64)
        if numbers is not None:
            assert numbers.dtype == np.int64 and numbers.ndim == 1
            head = numbers[: _FRAME - 1]
            frame[0] = len(numbers)
            frame.numpy()[1 : 1 + len(head)] = head
        self._run(lambda: self._control.broadcast(frame, 0))
        length = int(frame[0])
        if not 0 <= length <= _MAX_NUMBERS:
            raise ReplicaLost(f"rank {self.rank} of {self.size}: rank 0 announces {length} numbers")
        if length < _FRAME:
            return frame[1 : 1 + length].numpy()
        rest = torch.empty(length - (_FRAME - 1), dtype=torch.int64)
        if numbers is not None:
            rest.numpy()[:] = numbers[_FRAME - 1 :]
        self._run(lambda: self._control.broadcast(rest, 0))
        return torch.cat((frame[1:], rest)).numpy()

    def broadcast_on_device(self, x: Tensor) -> Tensor:
        """Overwrite x with rank 0's on every rank, in order with the current stream: on a GPU the host does not wait.

        All ranks pass the same shape and dtype.
        """
        if self.size > 1:
            self._run(lambda: self._compute.broadcast(x, 0))
        return x

    def broadcast_bytes(self, data: bytes | None = None) -> bytes:
        """Send rank 0's bytes to every rank; the others pass None."""
        if data is None:
            numbers = self.broadcast()
        else:
            padded = data + bytes(-len(data) % 8)
            numbers = self.broadcast(np.concatenate([[len(data)], np.frombuffer(padded, dtype=np.int64)]))
        return numbers[1:].tobytes()[: int(numbers[0]) if len(numbers) else 0]

    def _run(self, start: Callable[[], Work]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise ReplicaLost(f"rank {self.rank} of {self.size}: another rank is gone: {error}") from error


def _gloo(store: Store, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    gloo: Any = ProcessGroupGloo  # torch's stubs lack its options and this constructor
    options = gloo._Options()
    options._timeout = timeout
    options._threads = 1
    options._devices = [_device(host)]
    return gloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL  # only in CUDA builds of torch

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, size, options)


@lru_cache(maxsize=4)
def _device(host: str) -> ProcessGroupGloo.Device:
    """Return the Gloo device of an address, cached because it owns the thread that watches its sockets."""
    return ProcessGroupGloo.create_device(hostname=host)
