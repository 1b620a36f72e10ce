"""Facts that all processes share: addresses, the error tree, and conditions of a role switch."""

from __future__ import annotations

import re
from typing import Any

import pytest

from core.spec.loader import parse_spec
from core.spec.schema import PoolSpec
from core.types import errors
from core.types.errors import SpecError
from core.types.network import check_link, format_address, is_loopback, is_private, split_address
from core.types.request import Role
from core.types.role_switch import hindrance, unlike
from tests.support.import_graph import modules

_LOOPBACK = ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"]
_PRIVATE = ["10.1.2.3", "172.16.0.1", "192.168.3.4", "100.64.0.7", "169.254.1.1", "fd00::7", "fe80::1%eth0"]
_ELSEWHERE = ["8.8.8.8", "172.32.0.1", "2600::1", "redis.example.org", "", "10.0.0.1.example.org"]


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1:5"), ("::1", "[::1]:5"), ("[::1]", "[::1]:5"), ("fe80::1%eth0", "[fe80::1%eth0]:5")],
)
def test_address_of_ipv6_has_brackets(host: str, address: str) -> None:
    assert format_address(host, 5) == address
    assert split_address(address) == (host.strip("[]"), 5)


def test_loopback_and_private_addresses() -> None:
    assert all(map(is_loopback, _LOOPBACK)) and not any(map(is_loopback, _PRIVATE + _ELSEWHERE))
    assert all(map(is_private, _LOOPBACK + _PRIVATE)) and not any(map(is_private, _ELSEWHERE))


@pytest.mark.parametrize("link", ["nccl", "gloo", "nixl", "our_links:Fast"])
@pytest.mark.parametrize("host", ["8.8.8.8", "2600::1"])
def test_blocks_without_protection_do_not_leave_private_networks(link: str, host: str) -> None:
    with pytest.raises(SpecError, match=rf"^kv\.trust_network: {link} .* {host} "):
        check_link(link, host, trust_network=False)
    check_link(link, host, trust_network=True)
    check_link(link, "10.0.0.1", trust_network=False)
    check_link("tcp", host, trust_network=False)


_OURS = {
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.ClusterError)
}


def test_every_error_is_in_the_tree() -> None:
    for name, path in modules().items():
        for kind, bases in re.findall(r"^ *class (\w+)\(([^)]*)\)", path.read_text(), re.MULTILINE):
            names = {base.strip().rpartition(".")[2] for base in bases.split(",")}
            is_ours = name == errors.__name__ or not names & (_OURS | {"Exception"})
            assert is_ours, f"{name}.{kind} must be defined in {errors.__name__}"


def test_docstring_shows_the_tree() -> None:
    assert errors.__doc__
    drawn: list[tuple[int, str]] = []  # (depth, name) of the enclosing lines
    for line in errors.__doc__.splitlines()[2:]:
        name = line.lstrip("│├└─ ").split()[0]
        depth = (len(line) - len(line.lstrip("│├└─ "))) // 4
        drawn = [(at, above) for at, above in drawn if at < depth] + [(depth, name)]
        parents = [kind.__name__ for kind in getattr(errors, name).__mro__ if issubclass(kind, errors.ClusterError)]
        assert parents[::-1] == [above for _, above in drawn], line
    named = {line.lstrip("│├└─ ").split()[0] for line in errors.__doc__.splitlines()[2:]}
    assert named == _OURS


_ANY: dict[str, Any] = {  # pool fields that may differ, with a value other than the default
    "replicas": 3,
    "max_running": 7,
    "max_batch_tokens": 300,
    "max_waiting": 5,
}
_NONE: dict[str, Any] = {
    "tensor_parallel": 2,
    "resources": {"cpus": 2},
    "labels": {"pool": "prefill"},
    "kv_memory_gib": 2.0,
    "kv_host_gib": 1.0,
    "kv_disk_gib": 1.0,
    "kv_disk_path": "/somewhere",
}


def test_settings_read_at_a_switch_may_differ() -> None:
    assert not hindrance(parse_spec({}))
    assert not hindrance(parse_spec({"prefill": _ANY}))
    assert _ANY.keys() | _NONE.keys() == PoolSpec.model_fields.keys(), "classify the new pool field"


@pytest.mark.parametrize("field", _NONE)
def test_settings_fixed_at_load_prevent_a_switch_and_are_named(field: str) -> None:
    for pool in Role:
        reason = hindrance(parse_spec({pool.value: {field: _NONE[field]}}))
        assert reason.startswith(f"the pools differ in {field} (prefill ") and "make it equal in the spec" in reason


def test_expert_parallel_prevents_a_switch() -> None:
    spec = parse_spec({"decode": {"expert_parallel": True, "redundant_experts": 2}})
    reason = hindrance(spec)
    assert "expert_parallel (prefill False, decode True), redundant_experts (prefill 0, decode 2)" in reason


def test_changed_settings_are_compared_with_those_at_load() -> None:
    """Later changes of the spec do not affect the replica."""
    old, new = parse_spec({"decode": {"kv_memory_gib": 2.0}}), parse_spec({"decode": {"max_running": 3}})
    assert unlike(new, Role.DECODE, new) == []
    assert unlike(old, Role.DECODE, new) == ["kv_memory_gib"]
    assert unlike(old, Role.PREFILL, new) == [], "the prefill pool of the old spec equals both pools of the new one"
    assert unlike(parse_spec({"engine": {"cuda_graphs": "off"}}), Role.PREFILL, new) == ["engine"]


def test_draft_model_prevents_a_switch_only_on_a_gpu() -> None:
    draft = {"speculation": {"method": "draft", "model": "m"}}
    assert not hindrance(parse_spec(draft)) and not unlike(parse_spec({}), Role.PREFILL, parse_spec(draft))
    gpus = {pool.value: {"resources": {"gpus": 1}} for pool in Role}
    assert "speculation.model" in hindrance(parse_spec(draft | gpus)) and not hindrance(parse_spec(gpus))
    heads = {"speculation": {"method": "medusa", "model": "m"}}
    assert unlike(parse_spec({}), Role.PREFILL, parse_spec(heads)) == ["speculation"]
    assert unlike(parse_spec({}), Role.PREFILL, parse_spec({"speculation": {"method": "mtp"}})) == ["speculation"]
