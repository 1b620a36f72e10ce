"""Checks of the hosts of a deployment: each host examines itself, then their versions and clocks are compared.

A finding is one line. `error: ...` stops `cluster deploy`, `warning: ...` is only shown.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import os
import platform
import re
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from cluster.control.placement import Node, fits_when_empty
from core.model.config_file import config_file
from core.model.source import cache_root
from core.spec.schema import PoolSpec, Spec, is_fetched
from core.types.errors import DeployError
from core.types.request import Role

_PACKAGES = ("xpyd", "ray", "torch", "triton", "grpcio", "protobuf", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_GIB = 1 << 30
# Key leases and budgets depend on clocks.
_MAX_SKEW_S = 2.0


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """Findings of one host about itself, and the values that hosts must have in common."""

    ip: str
    findings: tuple[str, ...] = ()
    versions: Mapping[str, str]
    time_s: float  # Unix time by its clock


def check_hosts(spec: Spec, nodes: Sequence[Node], say: Callable[[str], None], *, is_local: bool = False) -> None:
    """Examine all nodes and show every finding. Raises DeployError for the first error.

    is_local: examine this machine in this process, instead of each node in a Ray task.
    """
    begin_s = time.time()
    if is_local:
        reports = [examine(spec, nodes)]
    else:
        from cluster.launch import driver  # imports Ray

        reports = driver.run_on_each(nodes, examine, spec, nodes)
    compared = compare(reports, begin_s=begin_s, end_s=time.time())
    findings = [*compared, *(finding for report in reports for finding in report.findings)]
    errors = [finding for finding in findings if finding.startswith("error: ")]
    for finding in findings:
        # The caller shows the first error.
        if finding not in errors[:1]:
            say(finding)
    if errors:
        raise DeployError(errors[0].removeprefix("error: "))


def examine(spec: Spec, nodes: Sequence[Node]) -> HostReport:
    """Examine this host: the only one of `nodes`, or the one that Ray names."""
    node = nodes[0]
    if len(nodes) > 1:
        import ray

        here = ray.get_runtime_context().get_node_id()
        node = next(one for one in nodes if one.id == here)
    pools = [spec.pool(role) for role in Role if spec.pool(role).replicas and fits_when_empty(spec.pool(role), node)]
    versions = {"python": platform.python_version(), "processor": platform.machine()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    errors = list(_errors(spec, pools))
    if any(pool.resources.gpus for pool in pools):
        errors += gpu_errors(*driver_version(), torch_cuda_version(), has_nccl=any("nccl" in name for name in versions))
    lines = [*(f"error: {node.ip}: {text}" for text in errors), *(f"warning: {node.ip}: {x}" for x in _warnings(pools))]
    return HostReport(ip=node.ip, findings=tuple(lines), versions=versions, time_s=time.time())


def compare(reports: Sequence[HostReport], *, begin_s: float, end_s: float) -> Iterator[str]:
    """Warn of versions that most hosts do not have, and of clocks that differ from this host's.

    begin_s, end_s: times by this host's clock between which the reports were made.
    """
    for name in sorted({name for report in reports for name in report.versions}):
        usual, _ = Counter(report.versions.get(name, "missing") for report in reports).most_common(1)[0]
        for report in reports:
            if (version := report.versions.get(name, "missing")) != usual:
                yield f"warning: {report.ip}: {name} is {version}, on other hosts {usual}; use the same on all"
    for report in reports:
        skew_s = min(0.0, report.time_s - begin_s) + max(0.0, report.time_s - end_s)
        if abs(skew_s) > _MAX_SKEW_S:
            yield f"warning: {report.ip}: its clock differs by {skew_s:+.1f} s; run chrony or systemd-timesyncd"


def gpu_errors(driver: str, driver_cuda: int, torch_cuda: str | None, *, has_nccl: bool) -> Iterator[str]:
    """Compare the driver, the newest major version of CUDA that it supports, and the one that torch was built for."""
    if not driver_cuda:
        yield "NVIDIA's driver does not answer; install it, and start containers with --gpus all"
    elif torch_cuda is None:
        yield "torch was built without CUDA; install PyPI's torch for Linux on x86_64"
    elif torch_cuda and driver_cuda < int(torch_cuda.partition(".")[0]):
        yield f"torch needs CUDA {torch_cuda}, driver {driver} supports {driver_cuda}.x; install a newer driver"
    if not has_nccl and not ctypes.util.find_library("nccl"):
        yield "NCCL is missing; install PyPI's torch, which brings it, or libnccl2"


def _errors(spec: Spec, pools: Sequence[PoolSpec]) -> Iterator[str]:
    sources = [source for source in (spec.model.source, spec.speculation.model) if source and pools]
    for place in (Path(source).expanduser() for source in sources if not is_fetched(source)):
        if not os.access(place if place.suffix == ".gguf" else config_file(place), os.R_OK):
            yield f"model {place} cannot be read; put it there, readable for the user that runs Ray"
    if pools and spec.kv.host_link == "nixl" and find_spec("nixl") is None:
        yield "kv.host_link is nixl, which is not installed; `pip install nixl`"
    for pool in (pool for pool in pools if pool.kv_disk_gib):
        needed_gib = pool.kv_disk_gib * pool.tensor_parallel
        path = Path(pool.kv_disk_path).expanduser() if pool.kv_disk_path else cache_root() / "blocks"
        place = next(parent for parent in (path, *path.parents) if parent.exists())
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            yield f"kv_disk_path: {place} is not a writable directory"
        elif (free_gib := shutil.disk_usage(place).free / _GIB) < needed_gib:
            yield f"kv_disk_gib: {path} has {free_gib:.1f} GiB free, but a replica's blocks may take {needed_gib:g} GiB"


def _warnings(pools: Sequence[PoolSpec]) -> Iterator[str]:
    needed_gib = [
        pool.tensor_parallel * (pool.kv_host_gib + (0.0 if pool.resources.gpus else pool.kv_memory_gib or 1.0))
        for pool in pools
    ]
    memory_gib, shared_gib = _memory_bytes() / _GIB, shutil.disk_usage("/dev/shm").free / _GIB
    files, locked = (resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    if needed_gib and min(needed_gib) > memory_gib:
        yield f"kv_memory_gib: a replica's KV takes {min(needed_gib):g} GiB, but the host has {memory_gib:.1f} GiB"
    if shared_gib < 0.5:
        yield f"/dev/shm has {shared_gib:.2f} GiB free; start containers with --shm-size=2g"
    if 0 <= files < 4096:
        yield f"a process may open {files} files; run `ulimit -Hn 65536` before `ray start`"
    if (space := resource.getrlimit(resource.RLIMIT_AS)[0]) >= 0:
        yield f"a process may map {space / _GIB:.1f} GiB, and torch maps more than it uses; run `ulimit -v unlimited`"
    if 0 <= locked < _GIB and Path("/sys/class/infiniband").exists():
        yield f"{locked >> 10} KiB may be locked, too little for RDMA; set `ulimit -l unlimited` before `ray start`"
    if any(not pool.resources.gpus for pool in pools) and not shutil.which("g++"):
        yield "g++ is missing, so steps run several times slower; run `apt-get install g++`"


def _memory_bytes() -> int:
    """Memory of the machine, or the limit of the container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # "max" means no limit
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    return total


def driver_version() -> tuple[str, int]:
    """Version of NVIDIA's driver, and the newest major version of CUDA that it supports; ("", 0) without one."""
    text, cuda = ctypes.create_string_buffer(96), ctypes.c_int()
    with contextlib.suppress(OSError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if not nvml.nvmlInit_v2():
            nvml.nvmlSystemGetDriverVersion(text, 96)
            nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))  # 13020 is 13.2
            nvml.nvmlShutdown()
    return text.value.decode(errors="replace"), cuda.value // 1000


def torch_cuda_version() -> str | None:
    """CUDA version that torch was built for; None: built without, "": unknown. Importing torch would take seconds."""
    torch = find_spec("torch")
    text = Path(torch.origin).with_name("version.py").read_text() if torch and torch.origin else ""
    found = re.search(r"^cuda\b[^=\n]*= *(?:'([^']*)'|None)", text, re.MULTILINE)
    return found[1] if found else ""
