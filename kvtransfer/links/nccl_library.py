"""The few functions of NCCL that a link calls, from the library that torch has loaded.

Not by torch's process group: that one makes its communicator inside of a first operation that nothing ends, takes its
stream from the pool that all share, and has threads that watch over it. Here a communicator is made without waiting,
polled, and aborted by whoever has had enough. Any thread may call, but one at a time for each communicator; only
`abort` may come beside a call that hangs.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from contextlib import suppress
from functools import lru_cache
from typing import Protocol

from core.types.errors import LinkClosed

_IN_PROGRESS = 7
_UINT8 = 1
_ID_BYTES = 128
_DISMISS_S = 1.0


class NcclError(RuntimeError):
    """What NCCL says."""


class Nccl(Protocol):
    """What a link needs of NCCL. Each raises NcclError; a communicator is a number that `begin` gives out."""

    def new_id(self) -> bytes:
        """By which two ranks find each other. Somebody listens for them from now on, until both came or `dismiss`."""
        ...

    def dismiss(self, id: bytes) -> None:
        """No rank comes any more for this id."""
        ...

    def begin(self, id: bytes, *, rank: int) -> int:
        """Start to make a communicator of two ranks on the current device; it may be used when it `is_ready`."""
        ...

    def is_ready(self, communicator: int) -> bool:
        """What was started last has been given to the device. Raises for what has failed since."""
        ...

    def send(self, communicator: int, address: int, num_bytes: int, *, to: int, stream: int) -> None:
        """Start to give a send to the stream."""
        ...

    def recv(self, communicator: int, address: int, num_bytes: int, *, of: int, stream: int) -> None:
        """Start to give a receive to the stream."""
        ...

    def abort(self, communicator: int) -> None:
        """End what is under way, also on the device, and the communicator with it."""
        ...


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * _ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.17, which later ones take: they know by its size and version what it lacks."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
    )


_MAGIC = 0xCAFEBEEF
_VERSION = 21700
_UNDEFINED = -(2**31)


class LoadedNccl:
    """NCCL itself."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        address, count, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        library.ncclCommInitRankConfig.argtypes = [ctypes.POINTER(address), number, _Id, number, address]
        library.ncclCommGetAsyncError.argtypes = [address, ctypes.POINTER(number)]
        library.ncclSend.argtypes = [address, count, number, number, address, address]
        library.ncclRecv.argtypes = [address, count, number, number, address, address]
        library.ncclCommAbort.argtypes = [address]
        library.ncclGetErrorString.restype = ctypes.c_char_p

    def new_id(self) -> bytes:
        id = _Id()
        self._check(self._library.ncclGetUniqueId(ctypes.byref(id)))
        return ctypes.string_at(ctypes.byref(id), _ID_BYTES)

    def dismiss(self, id: bytes) -> None:
        """NCCL has no call for it: its listener, a thread, ends when a rank hangs up that has only said hello."""
        with suppress(OSError, struct.error):  # it is not there any more, or other versions write ids in another way
            with socket.create_connection(_place_of(id), _DISMISS_S) as connection:
                connection.sendall(id[:8] + struct.pack("=i", 1))  # its magic number; and what kind of a socket this is

    def begin(self, id: bytes, *, rank: int) -> int:
        communicator = ctypes.c_void_p()
        config = _Config(
            ctypes.sizeof(_Config), _MAGIC, _VERSION, 0, _UNDEFINED, _UNDEFINED, _UNDEFINED, ctypes.c_char_p(None)
        )
        self._check(
            self._library.ncclCommInitRankConfig(
                ctypes.byref(communicator), 2, _Id.from_buffer_copy(id), rank, ctypes.byref(config)
            )
        )
        assert communicator.value, "NCCL has said that it makes one"
        return communicator.value

    def is_ready(self, communicator: int) -> bool:
        state = ctypes.c_int()
        self._check(self._library.ncclCommGetAsyncError(communicator, ctypes.byref(state)))
        self._check(state.value)
        return state.value != _IN_PROGRESS

    def send(self, communicator: int, address: int, num_bytes: int, *, to: int, stream: int) -> None:
        self._check(self._library.ncclSend(address, num_bytes, _UINT8, to, communicator, stream))

    def recv(self, communicator: int, address: int, num_bytes: int, *, of: int, stream: int) -> None:
        self._check(self._library.ncclRecv(address, num_bytes, _UINT8, of, communicator, stream))

    def abort(self, communicator: int) -> None:
        self._library.ncclCommAbort(communicator)

    def _check(self, code: int) -> None:
        if code not in (0, _IN_PROGRESS):
            raise NcclError(self._library.ncclGetErrorString(code).decode())


@lru_cache(maxsize=1)
def loaded_nccl() -> LoadedNccl:
    """That of this process. Raises LinkClosed where there is none."""
    try:
        return LoadedNccl(ctypes.CDLL("libnccl.so.2"))
    except OSError as error:
        raise LinkClosed(f"NCCL is not there ({error}): install torch for CUDA, or set kv.host_link") from error


def _place_of(id: bytes) -> tuple[str, int]:
    """Where an id's listener is: (magic number, socket address)."""
    family, port = struct.unpack("=H", id[8:10])[0], struct.unpack("!H", id[10:12])[0]
    packed = id[16:32] if family == socket.AF_INET6 else id[12:16]
    return socket.inet_ntop(family, packed), port
