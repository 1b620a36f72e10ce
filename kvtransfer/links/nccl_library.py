"""Bindings to the NCCL functions that a link calls, from the library that torch has loaded, and its environment.

torch's process group does not fit: it creates the communicator inside the first operation, which cannot be interrupted,
takes its stream from a shared pool, and runs watchdog threads. Here communicators are non-blocking, polled, and can be
aborted. Any thread may call, one at a time per communicator; only `abort` may run concurrently with a hanging call.

By default NCCL picks the first usable network interface, which may be on another network, such as a container bridge.
So it gets this host's own interface. A value of NCCL_SOCKET_IFNAME set by the operator is kept.
"""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from core.types.errors import LinkClosed

_IN_PROGRESS = 7
_UINT8 = 1
_ID_BYTES = 128
_DISMISS_S = 1.0
_INTERFACE, _HOST_ID = "NCCL_SOCKET_IFNAME", "NCCL_HOSTID"
_SIOCGIFADDR = 0x8915  # Linux: an interface's IPv4 address
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


class NcclError(RuntimeError):
    """Error reported by NCCL."""


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * _ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.17. Later versions accept it, based on its size and version fields."""

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


class Nccl:
    """NCCL functions that a link uses. All raise NcclError. A communicator is the handle that `begin` returns."""

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
        """Create the id by which two ranks connect. NCCL listens for them until both have connected or `dismiss`."""
        id = _Id()
        self._check(self._library.ncclGetUniqueId(ctypes.byref(id)))
        return ctypes.string_at(ctypes.byref(id), _ID_BYTES)

    def dismiss(self, id: bytes) -> None:
        """Stop listening for ranks of this id.

        NCCL has no call for this: its listener thread ends when a rank disconnects after its hello.
        """
        with suppress(OSError, struct.error):  # the listener has ended, or this version's ids have another format
            with socket.create_connection(_place_of(id), _DISMISS_S) as connection:
                connection.sendall(id[:8] + struct.pack("=i", 1))  # magic number, socket type

    def begin(self, id: bytes, *, rank: int) -> int:
        """Start creating a two-rank communicator on the current device. Usable once `is_ready`."""
        communicator = ctypes.c_void_p()
        config = ctypes.byref(_Config(ctypes.sizeof(_Config), _MAGIC, _VERSION, 0, _UNDEFINED, _UNDEFINED, _UNDEFINED))
        begin = self._library.ncclCommInitRankConfig
        self._check(begin(ctypes.byref(communicator), 2, _Id.from_buffer_copy(id), rank, config))
        assert communicator.value, "NCCL returned success without a communicator"
        return communicator.value

    def is_ready(self, communicator: int) -> bool:
        """Return whether the last started call has been enqueued on the device. Raises asynchronous errors."""
        state = ctypes.c_int()
        self._check(self._library.ncclCommGetAsyncError(communicator, ctypes.byref(state)))
        self._check(state.value)
        return state.value != _IN_PROGRESS

    def send(self, communicator: int, address: int, num_bytes: int, *, to: int, stream: int) -> None:
        """Start enqueueing a send on the stream."""
        self._check(self._library.ncclSend(address, num_bytes, _UINT8, to, communicator, stream))

    def recv(self, communicator: int, address: int, num_bytes: int, *, of: int, stream: int) -> None:
        """Start enqueueing a receive on the stream."""
        self._check(self._library.ncclRecv(address, num_bytes, _UINT8, of, communicator, stream))

    def abort(self, communicator: int) -> None:
        """Abort all operations, including those on the device, and destroy the communicator."""
        self._library.ncclCommAbort(communicator)

    def _check(self, code: int) -> None:
        if code not in (0, _IN_PROGRESS):
            raise NcclError(self._library.ncclGetErrorString(code).decode())


@lru_cache(maxsize=1)
def loaded_nccl() -> Nccl:
    """Return the process's NCCL. Raises LinkClosed if the library is missing."""
    try:
        return Nccl(ctypes.CDLL("libnccl.so.2"))
    except OSError as error:
        raise LinkClosed(f"NCCL not found ({error}): install torch for CUDA, or set kv.host_link") from error


def _place_of(id: bytes) -> tuple[str, int]:
    """Return the host and port of an id's listener. An id holds a magic number and a socket address."""
    family, port = struct.unpack("=H", id[8:10])[0], struct.unpack("!H", id[10:12])[0]
    packed = id[16:32] if family == socket.AF_INET6 else id[12:16]
    return socket.inet_ntop(family, packed), port


def guide_nccl(environment: MutableMapping[str, str], *, host: str, rank_on_shared_gpu: str = "") -> None:
    """Set NCCL's environment variables. Call this before the first use of NCCL, which reads them once.

    rank_on_shared_gpu: name of a process that shares its GPU; empty if it has whole GPUs. NCCL rejects two ranks of one
    communicator on one GPU unless their host ids differ; they then communicate over sockets.
    """
    if _INTERFACE not in environment and (interface := interface_for(host, dict(_addresses_here()))):
        environment[_INTERFACE] = interface
    if rank_on_shared_gpu:
        environment.setdefault(_HOST_ID, rank_on_shared_gpu)


def interface_for(host: str, addresses: Mapping[str, str]) -> str | None:
    """Return the value for NCCL_SOCKET_IFNAME, or None to leave it unset. addresses: interface names by address."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:  # a host name, which NCCL resolves itself
        return None
    names = (name for interface_address, name in addresses.items() if ip_address(interface_address) == address)
    return next((f"={name}" for name in names), None)  # "=" requests an exact match instead of a prefix match


def _addresses_here() -> Iterator[tuple[str, str]]:
    """Yield this host's addresses and the names of their interfaces."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield socket.inet_ntoa(answer[20:24]), name
    with suppress(OSError):
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            hexadecimal, *_, name = line.split()
            yield str(IPv6Address(int(hexadecimal, 16))), name
