"""Endpoints on one machine and on several."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.control.placement import Node
from cluster.launch.endpoints import Endpoints, admin_addresses, keys_of, open_ones, openai_urls, plan_endpoints
from core.spec.schema import RouterSpec
from core.types.errors import SpecError

HEAD = {"node:__internal_head__": 1.0}


def node(ip: str, *, pool: str = "", **more: Any) -> Node:
    return Node(id=ip, name=ip, ip=ip, labels={"pool": pool} if pool else {}, **more)


def plan(*nodes: Node, host: str | None = None) -> Endpoints:
    return plan_endpoints(RouterSpec(host=host), nodes, is_one_machine=len(nodes) == 1)


def test_one_machine_defaults_to_loopback() -> None:
    endpoints = plan(node("10.0.0.1", total=HEAD))
    assert (endpoints.grpc, endpoints.http) == ("127.0.0.1:50051", "http://127.0.0.1:8000")
    assert (endpoints.host, endpoints.actor_options) == ("127.0.0.1", {})
    opened = plan(node("10.0.0.1", total=HEAD), host="0.0.0.0")
    assert (opened.grpc, opened.http, opened.host) == ("10.0.0.1:50051", "http://10.0.0.1:8000", "0.0.0.0")


def test_ipv6_addresses_have_brackets() -> None:
    opened = plan(node("fd00::7", total=HEAD), host="::")
    assert (opened.grpc, opened.http, opened.host) == ("[fd00::7]:50051", "http://[fd00::7]:8000", "::")
    assert openai_urls(opened.http) == "http://[fd00::7]:8000/v1"
    loopback = plan(node("10.0.0.1", total=HEAD), host="[::1]")
    assert (loopback.grpc, loopback.host, loopback.opens_to) == ("[::1]:50051", "::1", "")
    assert open_ones("http://[fd00::7]:8000,http://[fd00::8]:8000", {"fd00::8"}) == "http://[fd00::8]:8000"
    assert admin_addresses(RouterSpec(admin_host="::", admin_port=9))[0] == "[::1]:9"
    opened_admin = RouterSpec(admin_port=9100, admin_host="0.0.0.0", replicas=2)
    assert admin_addresses(opened_admin) == tuple(f"127.0.0.1:{port}" for port in (9100, 9101, 9102, 9103))


def test_several_machines_default_to_the_heads_address() -> None:
    nodes = [node("10.0.0.2", pool="decode"), node("10.0.0.1", total=HEAD)]
    for host in (None, "0.0.0.0"):
        endpoints = plan(*nodes, host=host)
        assert (endpoints.grpc, endpoints.http) == ("10.0.0.1:50051", "http://10.0.0.1:8000")
        assert endpoints.host == host, "a wildcard only if configured"
        assert endpoints.actor_options == {"resources": {"node:__internal_head__": 0.001}}
    with pytest.raises(SpecError, match=r"router.host: 127.0.0.1 is on one machine, and .*; unset it, or set 0.0.0.0"):
        plan(*nodes, host="127.0.0.1")


def test_label_selects_router_nodes() -> None:
    nodes = [node("10.0.0.1", total=HEAD), *(node(f"10.0.0.{i}", pool="router") for i in (3, 4))]
    endpoints = plan(*nodes)
    assert endpoints.grpc == "10.0.0.3:50051,10.0.0.4:50051"
    assert endpoints.http == "http://10.0.0.3:8000,http://10.0.0.4:8000"
    assert openai_urls(endpoints.http) == "http://10.0.0.3:8000/v1,http://10.0.0.4:8000/v1"
    for whole, one in ((endpoints.grpc, "10.0.0.4:50051"), (endpoints.http, "http://10.0.0.4:8000")):
        assert open_ones(whole, {"10.0.0.4"}) == one and open_ones(whole, set()) == whole
    assert open_ones(endpoints.http, {"10.0.0.5", "10.0.0.4"}) == "http://10.0.0.4:8000,http://10.0.0.5:8000", (
        "labelled since"
    )
    assert open_ones("10.0.0.3:50051", {"10.0.0.4"}) == "10.0.0.3:50051", "one for all routers of a machine"
    assert endpoints.actor_options == {"label_selector": {"pool": "router"}}


@pytest.mark.parametrize(("routers", "hosts", "at_most"), [(1, 1, 1), (2, 1, 2), (2, 2, 1), (3, 2, 2), (2, 3, 1)])
def test_routers_are_spread_over_hosts(routers: int, hosts: int, at_most: int) -> None:
    nodes = [node("10.0.0.1", total=HEAD), *(node(f"10.0.1.{i}", pool="router") for i in range(hosts))]
    assert plan_endpoints(RouterSpec(replicas=routers), nodes, is_one_machine=False).max_per_node == at_most


def test_open_endpoints_need_a_keys_setting() -> None:
    """Until keys exist; then they are required, even if the spec does not set `keys`."""
    here, several = (node("10.0.0.1", total=HEAD),), (node("10.0.0.1", total=HEAD), node("10.0.0.2", pool="decode"))
    for endpoints in (plan(*here, host="0.0.0.0"), plan(*here, host="10.0.0.1"), plan(*several)):
        with pytest.raises(SpecError, match=r"router.keys: .* at (0.0.0.0|10.0.0.1); set required, .*, or set none "):
            keys_of(RouterSpec(), endpoints, has_keys=False)
        assert keys_of(RouterSpec(), endpoints, has_keys=True) == "required"
        for word in ("required", "none"):
            assert keys_of(RouterSpec(keys=word), endpoints, has_keys=False) == word
    # Loopback needs no keys.
    for host in (None, "127.0.0.1", "::1", "localhost"):
        endpoints = plan(node("10.0.0.1", total=HEAD), host=host)
        assert keys_of(RouterSpec(host=host), endpoints, has_keys=True) == "none"
    assert keys_of(RouterSpec(keys="required"), endpoints, has_keys=False) == "required"


def test_router_requires_keys_off_loopback() -> None:
    """Whatever `cluster deploy` decided."""
    assert RouterSpec().needs_keys("10.0.0.1") and RouterSpec().needs_keys("0.0.0.0") and RouterSpec().needs_keys("a")
    assert not RouterSpec().needs_keys("127.0.0.1") and not RouterSpec(keys="none").needs_keys("10.0.0.1")
    assert RouterSpec(keys="required").needs_keys("127.0.0.1")
