"""Asking every host of a Ray, or this machine alone, to look at itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from cluster.control.placement import Node, router_nodes
from cluster.doctor.checks import disk_paths, findings_of
from cluster.doctor.finding import Finding, Severity
from cluster.doctor.host_facts import HostFacts, HostQuestion, look
from cluster.launch.preflight import check_nodes, this_node
from cluster.ray.node_task import run_on
from core.spec.schema import Spec
from core.types.errors import DeployError
from core.types.request import Role

_LOOK_S = 60.0  # also where a process of Ray's must start for it first
_LOOPBACK = "127.0.0.1"
_RAY_PORT = 6379  # anything listens there, or refuses: both say that the host is reached


def examine_here(spec: Spec, *, is_deployed: bool = False) -> tuple[list[HostFacts], list[Finding]]:
    """This machine, as one on which all of a deployment runs. is_deployed: its doors are open."""
    host = look(_question(spec, spec.router.host or _LOOPBACK, has_router=True, is_deployed=is_deployed))
    return [host], [*_without_a_place(spec, [this_node()], is_deployed), *findings_of(spec, [host])]


def examine_nodes(
    spec: Spec, nodes: Sequence[Node], *, is_deployed: bool = False
) -> tuple[list[HostFacts], list[Finding]]:
    """All nodes of the Ray that this process is a driver of, at once. One that does not answer is a finding."""
    import ray

    with_router = {node.ip for node in router_nodes(nodes)}
    ips = [node.ip for node in nodes]
    asked = {}
    for node in nodes:
        question = _question(spec, node.ip, has_router=node.ip in with_router, is_deployed=is_deployed)
        peers = tuple(ip for ip in ips if ip != node.ip)
        asked[node.ip] = run_on(node.id, look, replace(question, peers=peers, peer_port=_RAY_PORT))
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=_LOOK_S)
    hosts, silent = list[HostFacts](), list[Finding]()
    for ip, reference in asked.items():
        try:
            hosts.append(ray.get(reference, timeout=0))
        except Exception as error:  # whatever it is, it is what is wrong with that host
            silent.append(_silent(ip, error))
    return hosts, [*silent, *_without_a_place(spec, nodes, is_deployed), *findings_of(spec, hosts)]


def _question(spec: Spec, ip: str, *, has_router: bool, is_deployed: bool) -> HostQuestion:
    router, ports = spec.router, list[tuple[str, int]]()
    has_router = has_router and not router.endpoints  # else the doors are another deployment's
    if has_router and not is_deployed:
        ports = [(router.host or ip, port) for port in (router.grpc_port, router.http_port)]
        ports += [(router.admin_host, port) for port in router.admin_ports]
    certificates = [(router.tls_cert, router.tls_key)] if has_router and router.tls_cert and router.tls_key else []
    return HostQuestion(
        ip=ip,
        ports=tuple(ports),
        directories=disk_paths(spec),
        redis=None if spec.index == "embedded" else spec.index,
        files=_model_files(spec),
        certificates=tuple(certificates),
    )


def _model_files(spec: Spec) -> tuple[str, ...]:
    """Of what is named by its place, a model and what drafts for it: every host that may have a replica reads it
    there."""
    if not any(spec.pool(role).replicas for role in Role):
        return ()
    drafts = spec.speculation.model if spec.speculation.method != "off" else None
    places = [
        Path(source).expanduser()
        for source in (spec.model.source, drafts)
        if source and source.partition(":")[0] not in ("pypi", "hf")
    ]
    return tuple(str(place) if place.suffix == ".gguf" else str(place / "config.json") for place in places)


def _without_a_place(spec: Spec, nodes: Sequence[Node], is_deployed: bool) -> Iterator[Finding]:
    """What `cluster deploy` would refuse first."""
    try:
        if not is_deployed:
            check_nodes(spec, nodes)
    except DeployError as error:
        fix = "fewer replicas, smaller `resources` or another `tensor_parallel`; or hosts that have as much"
        yield Finding(check="places", host="", severity=Severity.PROBLEM, found=str(error), fix=fix)


def _silent(ip: str, error: Exception) -> Finding:
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return Finding(
        check="hosts",
        host=ip,
        severity=Severity.PROBLEM,
        found=f"it does not answer, or cannot look: {said[-300:]}",
        fix="install this version of xpyd there, in the Python that runs Ray, and see `ray status`",
    )
