"""Model of a device with unordered streams, events and memory, which detects races.

It replaces `engine.runner.streams.streams_of` for a device that is really a CPU. Operations run when they are called,
so results are correct. Each read and write of memory is recorded under its stream with a vector clock (Mattern 1988; as
in FastTrack, Flanagan and Freund 2009). Two accesses to one byte, at least one of them a write, are a race unless one
is ordered before the other, whatever the device's timing.

    a stream   is ordered after its earlier operations, the events it waited for, and everything that the host had
               waited for when the operation was launched
    the host   is ordered after everything it has waited for; its threads count as one, in the order of their calls
    memory     is written by its stream when it is freed, as torch's allocator may reuse it

Torch's dispatcher reports operations of `watched` threads. Indices are resolved, so two blocks of a pool are separate.
Accesses by numpy are recorded as reads by the host.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Clock = Counter[str]  # stream -> number of its operations that are ordered before
HOST = "host"
_WAITS = ("aten._local_scalar_dense.default", "aten.equal.default", "aten.is_nonzero.default")
_AT_INDICES = ("aten.index.Tensor", "aten.index_put_.default", "aten.index_put.default")
_AT_ROWS = ("aten.index_select.default", "aten.index_copy_.default")


class FakeStreams:
    """Implementation of engine.runner.streams.Streams. Races are collected instead of raised, because threads may catch
    exceptions."""

    is_at_once = False

    def __init__(self, *, num_streams: int | None = None) -> None:
        """num_streams: number of streams that lanes share in turn, as with torch's streams; None: one per lane."""
        self.races: list[str] = []
        self._num_streams = num_streams
        self._num_lanes = 0
        self._clocks: dict[str, Clock] = {HOST: Counter()}
        self._memory: dict[int, _Memory] = {}
        self._names: dict[tuple[str, int], str] = {}
        self._own = threading.local()
        self._lock = threading.RLock()

    def streams_of(self, device: torch.device) -> FakeStreams:
        return self

    # Interface of engine.runner.streams.Streams.

    def mark(self) -> FakeEvent:
        with self._lock:
            return FakeEvent(self, self.clock(self.current).copy())

    def device_stream(self) -> FakeLane:
        with self._lock:
            number = self._num_lanes % self._num_streams if self._num_streams else self._num_lanes
            self._num_lanes += 1
        return FakeLane(self, f"lane {number}")

    def synchronize(self) -> None:
        self.mark().wait()

    def page_locked(self, size: int, dtype: torch.dtype) -> Tensor:
        with self._unseen():
            host = torch.empty(size, dtype=dtype)
        with self._lock:
            self._memory_of(host).is_host = True
        return host

    def upload(self, host: Tensor) -> Tensor:
        self._book(HOST, "filled by the host", [], [host])
        with self._unseen():
            copy = host.clone()
        self._book(self.current, "upload", [host], [copy])
        return copy

    def lock_pages(self, memory: Tensor) -> None:
        with self._lock:
            locked = self._memory_of(memory)
            locked.is_host = locked.is_locked = True

    def unlock_pages(self, memory: Tensor) -> None:
        with self._lock:
            unlocked = self._memory_of(memory)
            self._check_over(unlocked, HOST, "unlocked")
            unlocked.is_locked = False

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.is_contiguous() and source.is_contiguous()
        self._book(self.current, "copy", [source], [target])
        with self._unseen():
            target.copy_(source)

    # Interface for tests.

    @property
    def current(self) -> str:
        """Stream of the calling thread."""
        return getattr(self._own, "stream", "compute")

    @contextmanager
    def watched(self, stream: str) -> Iterator[None]:
        """Record the calling thread's operations under this stream."""
        before, self._own.stream = self.current, stream
        is_seen = getattr(self._own, "is_seen", False)
        try:
            if is_seen:
                yield
                return
            self._own.is_seen = True
            with _Seen(self), _SeenByNumpy(self):
                yield
        finally:
            self._own.stream, self._own.is_seen = before, is_seen

    def clock(self, stream: str) -> Clock:
        """Return the clock of the next operation on a stream if the host launched it now."""
        with self._lock:
            clock = self._clocks.setdefault(stream, Counter())
            clock |= self._clocks[HOST]
            self._clocks[stream] = clock
            return clock

    def join(self, stream: str, clock: Clock) -> None:
        """Order the stream's later operations after `clock`."""
        with self._lock:
            self._clocks[stream] = self.clock(stream) | clock

    def launch(self, label: str, *, reads: list[Tensor] = [], writes: list[Tensor] = []) -> None:  # noqa: B006
        """Record an operation on the calling thread's stream."""
        self._book(self.current, label, reads, writes)

    def looked_at(self, memory: Tensor) -> None:
        """Record a read by the host if the memory is host memory."""
        if getattr(self._own, "is_unseen", False):
            return
        with self._lock:
            if memory.numel() and self._memory_of(memory).is_host:
                self._book(HOST, "numpy", [memory], [])

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record an operation of torch."""
        if getattr(self._own, "is_unseen", False):
            return
        with self._lock:
            reads, writes = _accesses(func, args, kwargs, out)
            touched = [self._memory_of(tensor) for tensor, _ in (*reads, *writes) if tensor.numel()]
            if not touched or "empty" in str(func):  # allocations without an access
                return
            is_host = all(self._memory_of(tensor).is_host for tensor, _ in reads) and bool(reads)
            stream = HOST if is_host else self.current
            self._book_at(stream, str(func), reads, writes)
            if is_host:
                for tensor, _ in writes:
                    self._memory_of(tensor).is_host = True
            elif str(func) in _WAITS:
                self.synchronize()

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        self._own.is_unseen = True
        try:
            yield
        finally:
            self._own.is_unseen = False

    def _book(self, stream: str, label: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        with self._lock:
            self._book_at(stream, label, [(tensor, None) for tensor in reads], [(tensor, None) for tensor in writes])

    def _book_at(self, stream: str, label: str, reads: list[_Access], writes: list[_Access]) -> None:
        clock = self.clock(stream)
        clock[stream] += 1
        self._names[stream, clock[stream]] = label
        for accesses, is_write in ((reads, False), (writes, True)):
            for tensor, index in accesses:
                if tensor.numel():
                    memory = self._memory_of(tensor)
                    for other in memory.access(_cells(tensor, index), stream, clock, is_write=is_write):
                        verb = "writes to" if is_write else "reads"
                        self.races.append(
                            f"{label!r} on {stream} {verb} what {self._names[other]!r} on {other[0]} uses"
                        )

    def _memory_of(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        memory = self._memory.get(address)
        # The address may be reused before the previous storage is known to be freed, so it does not suffice.
        if memory is None or memory.of() is not storage or memory.size < storage.nbytes():
            memory = self._memory[address] = _Memory(storage, self.current)
            weakref.finalize(storage, self._let_go, address, memory)
        return memory

    def _let_go(self, address: int, memory: _Memory) -> None:
        with self._lock:
            if self._memory.get(address) is memory:
                del self._memory[address]
            if memory.is_locked:  # not from torch's allocator, which tracks running copies
                self._check_over(memory, HOST, "let go")
            elif not memory.is_host:
                self._check_over(memory, memory.home, "let go")

    def _check_over(self, memory: _Memory, stream: str, label: str) -> None:
        """Record a race unless all accesses are ordered before the next operation of this stream or the host."""
        for other in memory.unordered(self.clock(stream), but=stream):
            self.races.append(f"memory of {stream} is {label} while {self._names[other]!r} on {other[0]} uses it")


class FakeEvent:
    def __init__(self, streams: FakeStreams, clock: Clock) -> None:
        self._streams = streams
        self.clock = clock

    def hold_up(self) -> None:
        self._streams.join(self._streams.current, self.clock)

    def wait(self) -> None:
        self._streams.join(HOST, self.clock)

    @property
    def is_over(self) -> bool:
        """Return True and order the host after the event: a poll may succeed at any time."""
        self.wait()
        return True


class FakeLane:
    def __init__(self, streams: FakeStreams, name: str) -> None:
        self._streams = streams
        self.name = name

    @property
    def handle(self) -> int:
        return 0

    def close(self) -> None:
        pass

    def entered(self) -> AbstractContextManager[object]:
        return self._streams.watched(self.name)


class _Memory:
    """Last accesses to each byte of one allocation: operation numbers per stream; 0 for none."""

    def __init__(self, storage: torch.UntypedStorage, home: str) -> None:
        self.of = weakref.ref(storage)
        self.size = storage.nbytes()
        self.home = home  # stream of the allocation
        self.is_host = False
        self.is_locked = False  # page-locked with `lock_pages`
        self._written: dict[str, np.ndarray] = {}
        self._read: dict[str, np.ndarray] = {}

    def access(self, cells: Any, stream: str, clock: Clock, *, is_write: bool) -> set[tuple[str, int]]:
        """Record an access. Returns the operations that race with it."""
        found = {
            race
            for used in ([self._written, self._read] if is_write else [self._written])
            for race in _not_before(used, cells, clock, but=stream)
        }
        mine = self._written if is_write else self._read
        if stream not in mine:
            mine[stream] = np.zeros(self.size, dtype=np.int32)
        mine[stream][cells] = clock[stream]
        return found

    def unordered(self, clock: Clock, *, but: str) -> set[tuple[str, int]]:
        every = slice(None)
        return {race for used in (self._written, self._read) for race in _not_before(used, every, clock, but=but)}


def _not_before(used: dict[str, np.ndarray], cells: Any, clock: Clock, *, but: str) -> Iterator[tuple[str, int]]:
    for stream, numbers in used.items():
        if stream != but and (last := int(numbers[cells].max(initial=0))) > clock[stream]:
            yield stream, last


class _Seen(TorchDispatchMode):
    def __init__(self, streams: FakeStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._streams.saw(func, args, kwargs or {}, out)
        return out


class _SeenByNumpy(TorchFunctionMode):
    def __init__(self, streams: FakeStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is Tensor.numpy:
            self._streams.looked_at(args[0])
        return func(*args, **(kwargs or {}))


_Access = tuple[Tensor, Any]  # (tensor, index of the accessed elements; None: all)


def _accesses(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[list[_Access], list[_Access]]:
    """Return the reads and writes of a torch operation."""
    schema = func._schema
    if any(result.alias_info and not result.alias_info.is_write for result in schema.returns):
        return [], []  # a view does not access memory
    reads: list[_Access] = []
    writes: list[_Access] = []
    for number, argument in enumerate(schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value):
            (writes if is_write else reads).append((tensor, _picked(func, args, number)))
    known = {tensor.untyped_storage().data_ptr() for tensor, _ in (*reads, *writes)}
    writes += [(tensor, None) for tensor in _tensors(out) if tensor.untyped_storage().data_ptr() not in known]
    return reads, writes


def _picked(func: Any, args: Any, number: int) -> Any:
    """Return the index by which an operation selects from its first argument."""
    if number:
        return None
    if str(func) in _AT_INDICES:
        return tuple(slice(None) if index is None else index for index in args[1])
    if str(func) == "aten.embedding.default":
        return (args[1],)
    if str(func) in _AT_ROWS:
        return (*[slice(None)] * (args[1] % args[0].dim()), args[2])
    return None


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [one for one in value if isinstance(one, Tensor)] if isinstance(value, list | tuple) else []


def _cells(tensor: Tensor, index: Any) -> Any:
    """Return the positions of the indexed bytes in the tensor's storage."""
    size = tensor.itemsize
    if index is None and tensor.is_contiguous():
        begin = tensor.storage_offset() * size
        return slice(begin, begin + tensor.numel() * size)
    numbers = torch.arange(tensor.untyped_storage().nbytes() // size, dtype=torch.int64)
    elements = numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    if index is not None:
        elements = elements[index]
    return (elements.reshape(-1, 1).numpy() * size + np.arange(size)).ravel()
