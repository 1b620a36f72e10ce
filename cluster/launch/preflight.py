"""Checks before a deployment starts anything. Each raises SpecError or DeployError with one line."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from cluster.control.placement import Node, check_fit, pools_of
from cluster.launch import local_ray
from cluster.launch import state as states
from core.process.ports import is_free
from core.spec.schema import RouterSpec, Spec
from core.types.errors import DeployError, SpecError
from core.types.network import check_link, is_loopback, is_private
from core.types.request import Role

if TYPE_CHECKING:
    from core.model.shape import ModelConfig

_REDIS_S = 3.0
_POLL_S = 0.2


def check_is_free(name: str, say: Callable[[str], None]) -> None:
    """Check that the name is free. Cleans up after a killed command."""
    state = states.load(name)
    if state is None:
        return
    if state.is_interrupted or (state.joined_ray and not state.joined_ray.is_running):
        say(f"removing leftovers of an earlier {name}")
        if state.local_ray:
            local_ray.stop(state.local_ray)
        if state.local_ray or (state.lent_ray and not state.lent_ray.is_running):
            states.forget(name)
            return
        raise DeployError(
            f"a deployment of {name} was interrupted on Ray at {state.ray_address}; run `cluster down` first"
        )
    what = "is being deployed" if state.deploying else "is deployed already"
    raise DeployError(f"{name} {what}; `cluster scale` resizes it, `cluster down` takes it down")


def check_model(spec: Spec, say: Callable[[str], None]) -> None:
    """Fetch the model if needed, and check that both pools can run it."""
    from core.model import config as model_config
    from core.model import source as model_source
    from core.model.draft_heads import load_heads
    from core.model.draft_source import check_same_tokens, draft_source
    from frontend.chat.chat_template import ChatTemplate, find_chat_template
    from frontend.text.sampling_defaults import sampling_defaults

    model_dir = model_source.resolve(spec.model.source, progress=say)
    config = model_config.load(model_dir)
    ChatTemplate(find_chat_template(model_dir, spec.model.chat_template), special_tokens={})
    sampling_defaults(model_dir, spec.model.generation_config)
    if spec.engine.deterministic:
        config.check_deterministic()
    if spec.speculation.method == "self":
        config.check_drafts("speculation.method")
    if drafts := draft_source(spec, progress=say):
        if drafts.heads is None:
            model_config.load(drafts.directory).check_drafts("speculation.model")
            check_same_tokens(drafts.directory, model_dir)
        else:
            heads = load_heads(drafts.heads, drafts.directory, config)
            for role in Role:
                heads.check_tensor_parallel(spec.pool(role).tensor_parallel)
    check_ranks(spec, config)


def check_ranks(spec: Spec, config: ModelConfig) -> None:
    """Check, for both pools, that the model can be split over a replica's ranks and its KV quantized."""
    config.check_kv_dtype("kv.pool_dtype", spec.kv.pool_dtype)
    config.layers_at("kv.unquantized_layers", spec.kv.unquantized_layers)
    if spec.kv.pool_dtype == "auto":
        config.check_kv_dtype("kv.wire_dtype", spec.kv.wire_dtype)
    for role in Role:
        try:
            config.check_tensor_parallel(spec.pool(role).tensor_parallel)
            if role is Role.DECODE and spec.decode.expert_parallel:
                config.check_expert_parallel(spec.decode.tensor_parallel, redundant=spec.decode.redundant_experts)
        except SpecError as error:
            raise SpecError(f"{role}.{error}") from None


def check_index(url: str, *, name: str = "", trust_network: bool = False) -> None:
    """Check an external Redis: it must be protected and reachable, and no other deployment may use `name` in it.

    Without Redis, routers and replicas would run, but never find each other.
    """
    from core.index.membership import LEASE_S, living_members
    from core.index.redis_server import asked_once, place_of

    if url == "embedded":
        return
    if missing := "" if trust_network else _unprotected(url):
        raise SpecError(
            f"index: {place_of(url)} is not on loopback and has no {missing}; write "
            "rediss://:PASSWORD@HOST:PORT, or set kv.trust_network: true if the network is private to the cluster"
        )
    try:
        with asked_once(url, within_s=_REDIS_S) as redis:
            deadline = time.monotonic() + LEASE_S + _POLL_S
            while (living := living_members(redis, name)) and time.monotonic() < deadline:
                # These members may belong to a deployment that has just ended.
                time.sleep(_POLL_S)
    except DeployError as error:
        raise DeployError(f"index: {error}") from None
    if living:
        raise DeployError(
            f"index: {place_of(url)} serves another deployment called {name} ({', '.join(living[:3])}); "
            "choose another name with --name, or another Redis database"
        )


def check_network(spec: Spec, nodes: Sequence[Node], *, is_one_machine: bool = False) -> None:
    """Check that unprotected traffic stays on private networks on every node, unless the spec allows it.

    is_one_machine: the embedded index listens on loopback; links still use the node's address.
    """
    pools = [spec.pool(role) for role in Role]
    between_gpus = "nixl" if spec.kv.host_link == "nixl" else "nccl"
    links = {between_gpus if pool.resources.gpus else spec.kv.host_link for pool in pools}
    for node in nodes:
        for link in sorted(links):
            check_link(link, node.ip, trust_network=spec.kv.trust_network)
        is_index_seen = spec.index == "embedded" and node.is_head and not is_one_machine
        if is_index_seen and not (spec.kv.trust_network or is_private(node.ip)):
            raise SpecError(
                f"index: the embedded Redis has no TLS and {node.ip} is not in a private network; configure a "
                "rediss:// URL, or set kv.trust_network: true if the network is private to the cluster"
            )


def _unprotected(url: str) -> str:
    """Return the protection that a Redis beyond loopback lacks; empty if it lacks none."""
    parts = urlsplit(url)
    if parts.scheme == "unix" or parts.hostname is None or is_loopback(parts.hostname):
        return ""
    has_password = bool(parts.password or parse_qs(parts.query).get("password"))
    lacks = [name for name, is_there in (("password", has_password), ("TLS", parts.scheme == "rediss")) if not is_there]
    return " and no ".join(lacks)


def check_endpoint_ports(router: RouterSpec, hosts: Sequence[str], look: Callable[[int], Sequence[bool]]) -> None:
    """Check that both ports are free on `hosts`; look(port) returns one bool per host.

    Needed because routers share ports (SO_REUSEPORT): the kernel would share them with another deployment, too.
    """
    endpoints = {"gRPC": ("--grpc-port", router.grpc_port), "HTTP": ("--http-port", router.http_port)}
    if router.grpc_port == router.http_port:
        raise SpecError(
            f"router.http_port: {router.http_port} equals router.grpc_port; choose another with --http-port"
        )
    if router.admin_port and {router.grpc_port, router.http_port}.intersection(router.admin_ports):
        raise SpecError(
            f"router.admin_port: {router.admin_port} and the ports after it, one per router, overlap another port"
        )
    for endpoint, (option, port) in endpoints.items():
        for host, is_free_there in zip(hosts, look(port), strict=True):
            if not is_free_there:
                raise DeployError(f"{endpoint} port {port} on {host} is in use; choose another with {option}")


def check_ports(router: RouterSpec, host: str) -> None:
    """Check that both ports are free on `host`, an address of this machine."""
    check_endpoint_ports(router, [host], lambda port: [is_free(host, port)])
    if router.admin_port and not is_free(router.admin_host, router.admin_port):
        raise DeployError(f"port {router.admin_port} on {router.admin_host} is in use; set another router.admin_port")


def check_certificate(router: RouterSpec) -> None:
    """Check the TLS certificate of the endpoints, if configured: both files must be readable here and match."""
    import ssl

    if not (router.tls_cert and router.tls_key):
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(router.tls_cert, router.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise SpecError(f"router.tls_cert {router.tls_cert}, router.tls_key {router.tls_key}: {error}") from None


def check_nodes(spec: Spec, nodes: Sequence[Node], *, wait_for_nodes: bool = False) -> None:
    """Check that both pools fit on the nodes."""
    if not wait_for_nodes:
        pools = pools_of(spec)
        check_fit(nodes, pools, {role: pool.replicas for role, pool in pools.items()})


def this_node() -> Node:
    """Return this machine as the node that a local Ray would offer."""
    gpus = len([path for path in Path("/dev").glob("nvidia[0-9]*")])
    total = {"CPU": float(os.cpu_count() or 1), "GPU": float(gpus)}
    return Node(id="local", name=socket.gethostname(), ip="127.0.0.1", total=total, available=total)
