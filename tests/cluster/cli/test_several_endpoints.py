"""Client with several endpoints: it uses all of them, and a lost one costs only a short pause."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from cluster.cli.inference_client import InferenceClient
from core.process.ports import free_port
from core.rpc import inference_pb2 as pb
from core.types.errors import RequestFailed
from core.types.network import format_address
from core.wire.client_access import EndpointAccess
from tests.cluster.cli.fake_inference import FakeInference, serving
from tests.support.fake_cable import fake_cable
from tests.support.ipv6 import needs_ipv6
from tests.support.waiting import until

Endpoints = tuple[tuple[FakeInference, str], tuple[FakeInference, str]]


@pytest.fixture
def endpoints() -> Iterator[Endpoints]:
    with serving() as one, serving() as other:
        yield one, other


def ask(client: InferenceClient, prompt: str = "well met") -> str:
    """Send a request with a third of gRPC's default timeout for a silent peer."""
    events = client.generate(pb.GenerateRequest(prompt=prompt), timeout_s=20)
    return "".join(event.delta.text for event in events)


def test_all_endpoints_are_used(endpoints: Endpoints) -> None:
    (one, one_at), (other, other_at) = endpoints
    with InferenceClient(f"{one_at},{other_at}", EndpointAccess()) as client:
        assert until(lambda: ask(client) == "well met" and one.requests and other.requests)


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_silent_and_closed_endpoints_do_not_block(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as silent, serving(host) as (_, open_one):
        for other in (silent.getsockname()[1], free_port(host)):
            with InferenceClient(f"{format_address(host, other)},{open_one}", EndpointAccess()) as client:
                assert ask(client) == "well met"


async def test_endpoint_that_falls_silent_costs_a_pause(endpoints: Endpoints) -> None:
    (one, one_at), (other, other_at) = endpoints
    async with fake_cable(int(one_at.rpartition(":")[2])) as cable:
        with InferenceClient(f"127.0.0.1:{cable.port},{other_at}", EndpointAccess()) as client:
            while not (one.requests and other.requests):
                await asyncio.to_thread(ask, client)
            cable.fall_silent()
            num_other, before = len(other.requests), len(one.requests)
            # One turn per endpoint.
            for _ in range(2):
                assert await asyncio.to_thread(ask, client) == "well met"
            assert (len(one.requests), len(other.requests)) == (before, num_other + 2)


async def test_stream_of_a_lost_router_ends_with_an_error(endpoints: Endpoints) -> None:
    """The beginning has been printed, so only the client can retry."""
    (one, one_at), (other, other_at) = endpoints
    other.is_held = one.is_held = True
    async with (
        fake_cable(int(one_at.rpartition(":")[2])) as cable,
        fake_cable(int(other_at.rpartition(":")[2])) as second_cable,
    ):
        with InferenceClient(f"127.0.0.1:{cable.port},127.0.0.1:{second_cable.port}", EndpointAccess()) as client:
            events = client.generate(pb.GenerateRequest(prompt="well met"), timeout_s=20)
            assert (await asyncio.to_thread(next, events)).delta.text == "well"
            cable.pull_out()
            second_cable.pull_out()
            with pytest.raises(RequestFailed, match=r"the router was lost .*; retry the request: the same seed gives"):
                await asyncio.to_thread(next, events)


def test_router_errors_are_not_retried_elsewhere(endpoints: Endpoints) -> None:
    (one, one_at), (other, other_at) = endpoints
    with InferenceClient(f"{one_at},{other_at}", EndpointAccess()) as client:
        with pytest.raises(RequestFailed, match="unavailable: no replica"):
            ask(client, "lost")
    assert len(one.requests) + len(other.requests) == 1
