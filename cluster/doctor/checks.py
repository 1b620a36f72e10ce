"""What hosts have said, to what is wrong with them. Pure: every rule looks at plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from cluster.doctor.finding import Finding, Severity
from cluster.doctor.host_facts import HostFacts
from core.spec.schema import PoolSpec, Spec
from core.types.request import Role

_GIB = 1 << 30
_SKEW_S = 2.0  # leases, certificates and budgets of keys go by clocks
_MIN_FILES = 4096
_MIN_SHARED_GIB = 0.5
_SLOW_REDIS_MS = 5.0
_MIN_LOCKED_GIB = 1.0
_SOON_S = 14 * 86_400.0

Rule = Callable[[Spec, Sequence[HostFacts]], Iterable[Finding]]


def findings_of(spec: Spec, hosts: Sequence[HostFacts]) -> list[Finding]:
    """What is wrong, problems first."""
    found = [finding for rule in RULES for finding in rule(spec, hosts)]
    return sorted(found, key=lambda finding: finding.severity is not Severity.PROBLEM)


def _versions(spec: Spec, hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    """All hosts run the same code on the same libraries: what most have counts."""
    for name in sorted({name for host in hosts for name in host.packages} | {"python"}):
        versions = [host.packages.get(name, "none") if name != "python" else host.python for host in hosts]
        usual, _ = Counter(versions).most_common(1)[0]
        for host, version in zip(hosts, versions, strict=True):
            if version != usual:
                fix = f"install {name} {usual} there, as on the others, and start its Ray again"
                yield _problem("versions", host, f"{name} is {version}, elsewhere {usual}", fix)


def _packages(spec: Spec, hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    for host in hosts:
        for name in ("ray", "torch", "grpcio"):
            if name not in host.packages:
                yield _problem("packages", host, f"{name} is not installed", "pip install xpyd, as on the others")
        if not host.has_compiler and not host.devices:
            found = "no g++: steps are computed by torch alone, a few times slower"
            yield _warning("compiler", host, found, "install g++ (Debian: apt-get install g++)")


def _clocks(spec: Spec, hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    """By how far a clock is from the middle one. A host's own look takes time, which speaks for it."""
    if not hosts:
        return
    middle = sorted(host.time_s for host in hosts)[len(hosts) // 2]
    for host in hosts:
        skew_s = abs(host.time_s - middle) - host.took_s
        if skew_s > _SKEW_S:
            found = f"its clock is {host.time_s - middle:+.1f} s from the others'"
            yield _problem("clocks", host, found, "let it follow a time server (chrony, systemd-timesyncd)")


def _ports(spec: Spec, hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    fields = {
        spec.router.grpc_port: ("gRPC", "--grpc-port"),
        spec.router.http_port: ("HTTP", "--http-port"),
    }
    for host in hosts:
        for address, port in host.ports_taken:
            endpoint, option = fields.get(port, ("operators'", "--set router.admin_port=…"))
            fix = f"end what listens there (`ss -ltnp sport = :{port}`), or choose another with {option}"
            yield _problem("ports", host, f"{endpoint} port {port} on {address} cannot be opened", fix)


def _disks(spec: Spec, hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    needed = tuple(_disk_gib(spec).values())
    for host in hosts:
        for directory, gib in zip(host.directories, needed, strict=False):
            if directory.problem:
                fix = "make it, for the user who runs Ray there, or set another kv_disk_path"
                yield _problem("disk", host, directory.problem, fix)
            elif directory.is_memory:
                found = f"{directory.path} is in memory, which kv_host_gib takes at less cost"
                yield _warning("disk", host, found, "set kv_disk_path to a directory of a local disk")
            elif directory.free_bytes < gib * _GIB:
                found = f"{directory.path} has {directory.free_bytes / _GIB:.1f} GiB free, and blocks may take {gib:g}"
                yield _problem("disk", host, found, "free some, or set a smaller kv_disk_gib")


def _memory(spec: Spec, hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    """At least one replica of some pool must fit."""
    needed = {role: _host_gib(spec.pool(role)) for role in Role if spec.pool(role).replicas}
    for host in hosts:
        gib = host.memory_bytes / _GIB
        if needed and gib < min(needed.values()):
            role = min(needed, key=lambda role: needed[role])
            found = f"{gib:.1f} GiB of memory, and a {role} replica takes {needed[role]:g} for KV alone"
            yield _problem("memory", host, found, f"set a smaller {role}.kv_memory_gib or {role}.kv_host_gib")
        if host.shared_memory_bytes < _MIN_SHARED_GIB * _GIB:
            found = f"/dev/shm has {host.shared_memory_bytes / _GIB:.2f} GiB free: Ray would keep objects on disk"
            yield _warning("shared memory", host, found, "in a container: --shm-size=2g, or an emptyDir of memory")


def _limits(spec: Spec, hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    for host in hosts:
        if host.max_files < _MIN_FILES:
            found = f"a process may open {host.max_files} files; a router has one for each client and replica"
            fix = "`ulimit -Hn 65536` before `ray start` (systemd: LimitNOFILE=65536)"
            yield _problem("open files", host, found, fix)
        locked = host.max_locked_bytes
        if host.rdma_ports and locked is not None and locked < _MIN_LOCKED_GIB * _GIB:
            found = f"{locked >> 10} KiB may be locked: RDMA cannot register buffers"
            yield _problem("locked memory", host, found, "`ulimit -l unlimited` before `ray start`")


def _redis(spec: Spec, hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    for host in hosts:
        if host.redis_problem:
            fix = "see that it runs, that its password in `index` is right, and that no firewall is between"
            yield _problem("redis", host, host.redis_problem, fix)
        elif host.redis_ms is not None and host.redis_ms > _SLOW_REDIS_MS:
            found = f"{host.redis_ms:.1f} ms to Redis and back"
            yield _warning(
                "redis", host, found, "place it nearer: routers read it in the background, keys' limits do not"
            )
    if any(host.redis_policy.startswith("allkeys") for host in hosts):
        found = "Redis evicts any key when it is full, also the budgets of API keys"
        yield _warning("redis", None, found, "CONFIG SET maxmemory-policy volatile-lru")


def _files(spec: Spec, hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    for host in hosts:
        for why in host.unreadable:
            fix = "put it there, readable for the user who runs Ray"
            yield _problem("files", host, why, fix)


def _certificates(spec: Spec, hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    fix = "put a new one there, with its key; routers take it at their next start"
    for host in hosts:
        for certificate in host.certificates:
            left_s = certificate.until_s - host.time_s
            if certificate.problem:
                yield _problem("certificates", host, certificate.problem, "a PEM file each, which belong together")
            elif left_s < 0:
                yield _problem("certificates", host, f"{certificate.path} has expired", fix)
            elif left_s < _SOON_S:
                found = f"{certificate.path} expires in {left_s / 86_400:.0f} days"
                yield _warning("certificates", host, found, fix)


def _network(spec: Spec, hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    for host in hosts:
        for peer in host.unreachable:
            fix = "let hosts of the deployment reach each other on all ports (security group, firewall)"
            yield _problem("network", host, f"it cannot reach {peer}", fix)
        if host.name_is_loopback and len(hosts) > 1:
            found = f"its name {host.name} is an address of 127.0.0.0/8: Ray and NCCL may announce it to others"
            yield _warning("network", host, found, f"in /etc/hosts, give {host.name} the address {host.ip}")
        if host.proxies:
            found = f"{', '.join(host.proxies)} is set: calls between hosts may go to that proxy"
            yield _warning("proxies", host, found, "add the hosts' addresses to no_proxy, or unset it for Ray")


def _devices(spec: Spec, hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    wants = any(spec.pool(role).resources.gpus and spec.pool(role).replicas for role in Role)
    if wants and hosts and not any(host.devices for host in hosts):
        fix = "install NVIDIA's driver there, and start containers with --gpus all"
        yield _problem("gpus", None, "the spec wants GPUs, and no host has one that its driver knows", fix)
    having = [host for host in hosts if host.devices]
    for host in having if wants else ():
        if host.torch_cuda is None:
            found = f"torch {host.packages.get('torch', '')} was built without CUDA"
            yield _problem("gpus", host, found, "install PyPI's torch for Linux on x86_64, which brings CUDA and NCCL")
        elif host.torch_cuda and 0 < host.driver_cuda < int(host.torch_cuda.partition(".")[0]):
            found = f"torch was built for CUDA {host.torch_cuda}, and driver {host.driver} knows {host.driver_cuda}.x"
            yield _problem("gpus", host, found, "install a newer driver, or a torch for that CUDA")
    for what, values in (("driver", [h.driver for h in having]), ("NCCL", [h.nccl for h in having])):
        usual = Counter(values).most_common(1)[0][0] if values else ""
        for host, value in zip(having, values, strict=True):
            if value != usual:
                found = f"{what} {value or 'none'}, elsewhere {usual}"
                yield _problem("gpus", host, found, f"the same {what} on all hosts with GPUs")
    for host in having:
        for port, state in host.rdma_ports.items():
            if "ACTIVE" not in state:
                found = f"RDMA port {port} is {state.partition(': ')[2] or state}: NCCL goes over slower ones"
                yield _warning("rdma", host, found, f"see its cable and switch (`ibstat {port.partition('/')[0]}`)")


def _links(spec: Spec, hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    if spec.kv.host_link == "nixl":
        for host in hosts:
            if not host.has_nixl:
                found = "kv.host_link is nixl, and that is not installed"
                yield _problem("links", host, found, "pip install nixl on every node that may have a replica")


def _machines(spec: Spec, hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    if spec.engine.deterministic and len(kinds := {host.machine for host in hosts}) > 1:
        found = f"processors of {' and '.join(sorted(kinds))}: engine.deterministic promises the same bits on one kind"
        yield _warning("processors", None, found, "keep each pool to one kind by labels")


RULES: tuple[Rule, ...] = (
    _packages,
    _versions,
    _clocks,
    _ports,
    _disks,
    _memory,
    _limits,
    _redis,
    _files,
    _certificates,
    _network,
    _devices,
    _links,
    _machines,
)


def disk_paths(spec: Spec) -> tuple[str, ...]:
    """The directories in which its replicas keep blocks."""
    return tuple(_disk_gib(spec))


def _disk_gib(spec: Spec) -> dict[str, float]:
    """Of one replica of each pool that keeps blocks there, by directory; "" is where the spec names none."""
    needed: dict[str, float] = {}
    for role in Role:
        pool = spec.pool(role)
        if pool.replicas and pool.kv_disk_gib:
            path = pool.kv_disk_path or ""
            needed[path] = needed.get(path, 0.0) + pool.kv_disk_gib * pool.tensor_parallel
    return needed


def _host_gib(pool: PoolSpec) -> float:
    """Of the host's memory, for one replica's KV."""
    on_host = pool.kv_host_gib + (0.0 if pool.resources.gpus else pool.kv_memory_gib or 1.0)
    return on_host * pool.tensor_parallel


def _problem(check: str, host: HostFacts | None, found: str, fix: str) -> Finding:
    return Finding(check=check, host=host.ip if host else "", severity=Severity.PROBLEM, found=found, fix=fix)


def _warning(check: str, host: HostFacts | None, found: str, fix: str) -> Finding:
    return Finding(check=check, host=host.ip if host else "", severity=Severity.WARNING, found=found, fix=fix)
