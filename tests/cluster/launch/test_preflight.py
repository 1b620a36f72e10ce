"""Mismatches between spec, model and Redis are reported before anything is placed."""

from __future__ import annotations

import asyncio
import re
import socket
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio import Redis

from cluster.control.placement import Node
from cluster.launch.preflight import check_endpoint_ports, check_index, check_model, check_network, check_ports
from core.index import membership, redis_server
from core.index.membership import Membership
from core.process.ports import free_port
from core.spec.loader import parse_spec
from core.spec.schema import RouterSpec
from core.types.errors import DeployError, SpecError
from tests.core.model.test_config import write, write_no_weights
from tests.support.members import make_member

_EXPERTS = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 2}
_RECURRENT = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "layer_types": ["linear_attention", "full_attention"] * 30,
}
_STATES = {"architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv", "full_attention"]}


def _whole(num_redundant: int) -> dict[str, Any]:
    return {"decode": {"tensor_parallel": 2, "expert_parallel": True, "redundant_experts": num_redundant}}


@pytest.mark.parametrize(
    ("model", "tree", "error"),
    [
        (_EXPERTS, _whole(5), None),
        (_EXPERTS, _whole(6), r"decode\.redundant_experts: 6 are more than the 5 that 2 ranks do not hold"),
        (
            _EXPERTS,
            {"decode": {"tensor_parallel": 5}},
            r"decode\.tensor_parallel: 5 does not fit 12 query and 4 KV heads",
        ),
        ({}, {"kv": {"unquantized_layers": [0, -1], "pool_dtype": "int4"}}, None),
        ({}, {"kv": {"unquantized_layers": [99]}}, r"kv\.unquantized_layers: layer 99 is out of range"),
        (_RECURRENT, {"speculation": {"method": "ngram"}, "decode": {"tensor_parallel": 2}}, None),
        (
            _RECURRENT,
            {"decode": {"tensor_parallel": 6}},
            r"decode\.tensor_parallel: 6 does not fit .* and recurrent layers of 16 heads",
        ),
        (_STATES, {"prefill": {"kv_host_gib": 1}}, None),
        (_STATES, {"decode": {"kv_disk_gib": 1, "kv_disk_path": "/kv"}}, None),
        (_STATES, {"speculation": {"method": "suffix"}}, None),
        (_STATES, {"speculation": {"method": "self"}}, r"^speculation\.method: Lfm2ForCausalLM has states, and can"),
        (
            {},
            {"speculation": {"method": "draft", "model": "draft"}},
            r"^speculation\.model: Lfm2ForCausalLM has states",
        ),
        ({}, {"model": {"chat_template": "{% if %}"}}, "no valid Jinja"),
    ],
    ids=str,
)
def test_spec_must_fit_the_model(
    model: dict[str, Any], tree: dict[str, Any], error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, changes in (("model", {"architectures": ["LlamaForCausalLM"], **model}), ("draft", _STATES)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, **changes)
        write_no_weights(tmp_path / name)
        (tmp_path / name / "tokenizer.json").touch()
    with pytest.raises(SpecError, match=error) if error else nullcontext():
        check_model(parse_spec({**tree, "model": {"source": "model", **tree.get("model", {})}}), print)


def test_unreachable_redis_is_named_without_password(redis_url: str) -> None:
    check_index("embedded")
    check_index(redis_url)
    port = free_port()
    error = rf"^index: no Redis answers at redis://127.0.0.1:{port}/2: .*refused"
    with pytest.raises(DeployError, match=error) as raised:
        check_index(f"redis://user:s3cret@127.0.0.1:{port}/2?password=s3cret")
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "missing"),
    [
        ("redis://10.0.0.5:6379", "no password and no TLS"),
        ("redis://:s3cret@10.0.0.5:6379/1", "no TLS"),
        ("rediss://10.0.0.5", "no password"),
        ("rediss://user@redis.example.org:6380", "no password"),
        ("redis://redis.example.org?password=s3cret", "no TLS"),
    ],
)
def test_redis_off_loopback_needs_password_and_tls(url: str, missing: str) -> None:
    with pytest.raises(SpecError, match=rf"^index: .* is not on loopback and has {missing}; write rediss://") as raised:
        check_index(url)
    assert "s3cret" not in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "trust"),
    [
        ("rediss://:s3cret@127.0.0.2:1", False),
        ("redis://localhost:1", False),
        ("redis://[::1]:1", False),
        ("redis://10.255.255.1", True),
        ("unix:///nowhere/redis.sock", False),
    ],
)
def test_protected_or_trusted_redis_is_only_probed(monkeypatch: pytest.MonkeyPatch, url: str, trust: bool) -> None:
    urls: list[str] = []

    def answers(url: str, within_s: float) -> AbstractContextManager[SimpleNamespace]:
        urls.append(url)
        return nullcontext(SimpleNamespace(smembers=lambda key: set()))

    monkeypatch.setattr(redis_server, "asked_once", answers)
    check_index(url, trust_network=trust)
    assert urls == [url]


async def test_redis_accepts_a_deployment_name_once(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two deployments of one name would overwrite each other's entries."""
    async with Redis.from_url(redis_url) as redis:
        await Membership(redis, name="green", key=bytes(32)).renew(make_member("decode-0"))
        # For how long existing members are awaited.
        monkeypatch.setattr(membership, "LEASE_S", 0.0)
        with pytest.raises(DeployError, match=r"serves another deployment called green \(decode-0\); choose another"):
            await asyncio.to_thread(check_index, redis_url, name="green")
        await asyncio.to_thread(check_index, redis_url, name="blue")
        await Membership(redis, name="green", key=bytes(32)).leave("decode-0")
        await asyncio.to_thread(check_index, redis_url, name="green")


_GPUS = {role: {"resources": {"gpus": 1}} for role in ("prefill", "decode")}


def _node(ip: str, *, is_head: bool = True) -> Node:
    return Node(id=ip, name=ip, ip=ip, total={"node:__internal_head__": 1.0} if is_head else {})


@pytest.mark.parametrize(
    ("tree", "error"),
    [
        ({}, r"index: the embedded Redis has no TLS and 8\.8\.8\.8"),
        ({"index": "rediss://:p@10.0.0.1", "kv": {"host_link": "gloo"}}, r"kv\.trust_network: gloo"),
        ({"index": "rediss://:p@10.0.0.1", "kv": {"host_link": "links:Fast"}}, r"kv\.trust_network: links:Fast"),
        ({"index": "rediss://:p@10.0.0.1", **_GPUS}, r"kv\.trust_network: nccl"),
        ({"index": "rediss://:p@10.0.0.1", "kv": {"host_link": "nixl"}, **_GPUS}, r"kv\.trust_network: nixl"),
        ({"index": "rediss://:p@10.0.0.1"}, None),
    ],
    ids=str,
)
def test_unprotected_traffic_needs_a_private_network(tree: dict[str, Any], error: str | None) -> None:
    spec = parse_spec(tree)
    check_network(spec, [_node("10.0.0.1"), _node("192.168.0.2", is_head=False)])
    public = [_node("8.8.8.8"), _node("10.0.0.2", is_head=False)]
    if error is None:
        check_network(spec, public)
        return
    with pytest.raises(SpecError, match=error):
        check_network(spec, public)
    if "index" in error:
        check_network(spec, public[:1], is_one_machine=True)
    trusting = spec.model_copy(update={"kv": spec.kv.model_copy(update={"trust_network": True})})
    check_network(trusting, public)


def test_used_port_is_found_on_every_host() -> None:
    """The kernel would let the two share the port."""
    spec = parse_spec({"router": {"replicas": 2}})
    looks: list[int] = []

    def look(port: int) -> list[bool]:
        looks.append(port)
        return [True, port != 8000]

    with pytest.raises(DeployError, match=re.escape("HTTP port 8000 on 10.0.0.2 is in use; choose another with")):
        check_endpoint_ports(spec.router, ["10.0.0.1", "10.0.0.2"], look)
    assert looks == [50051, 8000]


def test_used_ports_are_found_before_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        http = taken.getsockname()[1]
        error = f"HTTP port {http} on 127.0.0.1 is in use; choose another with --http-port"
        with pytest.raises(DeployError, match=error):
            check_ports(RouterSpec(grpc_port=free_port(), http_port=http), "127.0.0.1")
