"""What one host says of itself: plain values, gathered there, judged elsewhere (cluster.doctor.checks)."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import shutil
import socket
import ssl
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from core.model.source import cache_root
from core.types.errors import DeployError

# What two hosts must have in common: these speak with each other, or compute what must be equal.
PACKAGES = ("xpyd", "ray", "torch", "triton", "grpcio", "protobuf", "numpy", "tokenizers", "llguidance")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")  # what torch loads, whichever it was built for
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY")
_ASK_S = 3.0
_INFINIBAND = Path("/sys/class/infiniband")
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, kw_only=True)
class HostQuestion:
    """What a host is asked to look at."""

    ip: str
    ports: tuple[tuple[str, int], ...] = ()  # (address of this host, port) on which something of ours is to listen
    directories: tuple[str, ...] = ()  # in which blocks are kept; `~` is whoever runs there, "" the cache directory's
    redis: str | None = None  # the URL of a Redis of the operator's own
    files: tuple[str, ...] = ()  # that the host must be able to read
    certificates: tuple[tuple[str, str], ...] = ()  # PEM files: a certificate, and its key
    peers: tuple[str, ...] = ()  # addresses of the other hosts
    peer_port: int = 0  # on which Ray listens on each; 0: peers are not tried


@dataclass(frozen=True, kw_only=True)
class DirectoryFacts:
    path: str
    problem: str = ""  # why nothing can be written there; empty: it can
    free_bytes: int = 0
    is_memory: bool = False  # a file system that is none of a disk's


@dataclass(frozen=True, kw_only=True)
class CertificateFacts:
    path: str
    problem: str = ""  # why it cannot be used; empty: it can
    until_s: float = 0.0  # it is valid, by the host's clock


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """A GPU, as its driver tells."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """One host. What does not concern it is empty."""

    ip: str
    name: str = ""
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)  # version by name; absent where not installed
    machine: str = ""  # of its processor, such as x86_64
    time_s: float = 0.0  # its clock's, when it looked
    took_s: float = 0.0
    memory_bytes: int = 0  # that it may use
    shared_memory_bytes: int = 0  # free in /dev/shm, where Ray keeps objects
    max_files: int = 0
    max_locked_bytes: int | None = None  # None: as many as there are
    has_compiler: bool = False
    proxies: tuple[str, ...] = ()  # variables of its environment that send calls elsewhere
    name_is_loopback: bool = False  # its own name is an address at which no other host finds it
    ports_taken: tuple[tuple[str, int], ...] = ()
    directories: tuple[DirectoryFacts, ...] = ()
    redis_problem: str = ""
    redis_ms: float | None = None  # to it and back; None: it was not asked, or did not answer
    redis_policy: str = ""  # maxmemory-policy, where it tells
    unreadable: tuple[str, ...] = ()  # files, with why
    certificates: tuple[CertificateFacts, ...] = ()
    unreachable: tuple[str, ...] = ()  # peers
    devices: tuple[DeviceFacts, ...] = ()
    driver: str = ""  # of the GPUs
    driver_cuda: int = 0  # the newest major version of CUDA that the driver knows; 0: it does not tell
    torch_cuda: str | None = ""  # what torch was built for; None: for none, "": it does not tell
    nccl: str = ""
    has_nixl: bool = False
    rdma_ports: Mapping[str, str] = field(default_factory=dict)  # state by device and port, as the kernel names them


def look(question: HostQuestion) -> HostFacts:
    """On the host that runs this. What cannot be found out is left empty; nothing is changed."""
    begin = time.monotonic()
    redis_problem, redis_ms, redis_policy = _redis(question.redis)
    devices, driver, driver_cuda = _gpus()
    return HostFacts(
        ip=question.ip,
        name=socket.gethostname(),
        python=platform.python_version(),
        packages=_versions(PACKAGES),
        machine=platform.machine(),
        memory_bytes=_memory_bytes(),
        shared_memory_bytes=_free_bytes("/dev/shm"),
        max_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        max_locked_bytes=_bounded(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        has_compiler=shutil.which("g++") is not None,
        proxies=tuple(name for name in _PROXIES if os.environ.get(name)),
        name_is_loopback=_name_is_loopback(),
        ports_taken=tuple(place for place in question.ports if not _is_free(*place)),
        directories=tuple(_directory(path) for path in question.directories),
        redis_problem=redis_problem,
        redis_ms=redis_ms,
        redis_policy=redis_policy,
        unreadable=tuple(why for path in question.files if (why := _unreadable(path))),
        certificates=tuple(_certificate(*paths) for paths in question.certificates),
        unreachable=tuple(peer for peer in question.peers if question.peer_port and not _answers(peer, question)),
        devices=devices,
        driver=driver,
        driver_cuda=driver_cuda,
        torch_cuda=_torch_cuda(),
        has_nixl=find_spec("nixl") is not None,
        nccl=next(iter(_versions(_NCCL).values()), ""),
        rdma_ports=_rdma_ports(_INFINIBAND),
        time_s=time.time(),
        took_s=time.monotonic() - begin,
    )


def _versions(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _memory_bytes() -> int:
    """Of the machine, or as much as the container may have."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _MEMORY_LIMITS:
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def _bounded(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _free_bytes(path: str) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def _name_is_loopback() -> bool:
    try:
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        return False


def _is_free(host: str, port: int) -> bool:
    from core.process.ports import is_free

    try:
        return is_free(host, port)
    except DeployError:
        return False  # no address of this host


def _directory(path: str) -> DirectoryFacts:
    """Of a directory that is not there yet, the one in which it would be made."""
    place = Path(path).expanduser() if path else cache_root() / "blocks"
    path = str(place)
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return DirectoryFacts(path=path, problem=f"{place} is no directory")
    if not os.access(place, os.W_OK | os.X_OK) or os.statvfs(place).f_flag & os.ST_RDONLY:
        return DirectoryFacts(path=path, problem=f"{place} cannot be written")
    return DirectoryFacts(path=path, free_bytes=_free_bytes(str(place)), is_memory=_kind(place) in ("tmpfs", "ramfs"))


def _kind(place: Path) -> str:
    """Of the file system there."""
    best, kind = "", ""
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return ""
    for line in mounts:
        _, at, name, *_ = line.split(" ")
        if place.resolve().is_relative_to(at) and len(at) >= len(best):
            best, kind = at, name
    return kind


def _redis(url: str | None) -> tuple[str, float | None, str]:
    """What is wrong, milliseconds to it and back, and what it throws out when it is full."""
    if url is None:
        return "", None, ""
    from core.index.redis_server import asked_once

    try:
        with asked_once(url, within_s=_ASK_S) as redis:
            redis.ping()
            begin = time.monotonic()
            redis.ping()
            took_ms = 1e3 * (time.monotonic() - begin)
            return "", took_ms, str((redis.info("memory") or {}).get("maxmemory_policy", ""))
    except DeployError as error:
        return str(error), None, ""


def _unreadable(path: str) -> str:
    try:
        with open(path, "rb"):
            return ""
    except OSError as error:
        return f"{path}: {error.strerror}"


def _certificate(path: str, key: str) -> CertificateFacts:
    from cryptography import x509

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(path, key)
        until = x509.load_pem_x509_certificate(Path(path).read_bytes()).not_valid_after_utc
    except (OSError, ssl.SSLError, ValueError) as error:
        return CertificateFacts(path=path, problem=f"{path}, {key}: {error}")
    return CertificateFacts(path=path, until_s=until.timestamp())


def _answers(peer: str, question: HostQuestion) -> bool:
    try:
        with socket.create_connection((peer, question.peer_port), timeout=_ASK_S):
            return True
    except ConnectionRefusedError:
        return True  # the host is there, and says so
    except OSError:
        return False


def _gpus() -> tuple[tuple[DeviceFacts, ...], str, int]:
    """By NVIDIA's management library, which the driver brings: they, its version, and CUDA's."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return (), "", 0
    if nvml.nvmlInit_v2():
        return (), "it does not start", 0
    count, text, devices = ctypes.c_uint(), ctypes.create_string_buffer(96), []
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for number in range(count.value):
        device, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
        nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device))
        nvml.nvmlDeviceGetName(device, text, 96)
        nvml.nvmlDeviceGetMemoryInfo(device, memory)
        devices.append(DeviceFacts(name=text.value.decode(errors="replace"), memory_bytes=memory[0]))
    nvml.nvmlSystemGetDriverVersion(text, 96)
    driver = text.value.decode(errors="replace")
    cuda = ctypes.c_int()  # 13020 is 13.2
    nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
    nvml.nvmlShutdown()
    return tuple(devices), driver, cuda.value // 1000


def _torch_cuda() -> str | None:
    """What torch says in its own file, for to import it takes seconds."""
    torch = find_spec("torch")
    try:
        text = Path(torch.origin).with_name("version.py").read_text() if torch and torch.origin else ""
    except OSError:
        return ""
    said = re.search(r"^cuda\b[^=\n]*= *(?:'([^']*)'|None)", text, re.MULTILINE)
    return said[1] if said else ""


def _rdma_ports(root: Path) -> dict[str, str]:
    """`mlx5_0/1`: `4: ACTIVE`, as the kernel tells."""
    states = {}
    for state in sorted(root.glob("*/ports/*/state")):
        try:
            states[f"{state.parts[-4]}/{state.parts[-2]}"] = state.read_text().strip()
        except OSError:
            continue
    return states
