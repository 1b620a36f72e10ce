"""A client that knows several doors: it uses all of them, and one that is lost costs a request no more than a pause."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from cluster.cli.inference_client import InferenceClient
from core.rpc import inference_pb2 as pb
from core.types.errors import RequestFailed
from core.wire.client_access import EndpointAccess
from tests.cluster.cli.fake_inference import FakeInference, serving
from tests.support.fake_cable import fake_cable
from tests.support.waiting import until


@pytest.fixture
def endpoints() -> Iterator[tuple[tuple[FakeInference, str], tuple[FakeInference, str]]]:
    with serving() as one, serving() as other:
        yield one, other


def ask(client: InferenceClient, prompt: str = "well met") -> str:
    """Within a third of what gRPC by itself would wait for a peer that has fallen silent."""
    events = client.generate(pb.GenerateRequest(prompt=prompt), timeout_s=20)
    return "".join(event.delta.text for event in events)


def test_it_uses_all_of_them(endpoints: tuple[tuple[FakeInference, str], tuple[FakeInference, str]]) -> None:
    (one, one_at), (other, other_at) = endpoints
    with InferenceClient(f"{one_at},{other_at}", EndpointAccess()) as client:
        assert until(lambda: ask(client) == "well met" and one.requests and other.requests)


def test_one_that_takes_a_connection_and_says_nothing_keeps_nobody_waiting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, serving() as (_, open_one):
        with InferenceClient(f"127.0.0.1:{silent.getsockname()[1]},{open_one}", EndpointAccess()) as client:
            assert ask(client) == "well met"


async def test_one_that_falls_silent_costs_a_pause(
    endpoints: tuple[tuple[FakeInference, str], tuple[FakeInference, str]],
) -> None:
    (one, one_at), (other, other_at) = endpoints
    async with fake_cable(int(one_at.rpartition(":")[2])) as cable:
        with InferenceClient(f"127.0.0.1:{cable.port},{other_at}", EndpointAccess()) as client:
            while not (one.requests and other.requests):
                await asyncio.to_thread(ask, client)
            cable.fall_silent()
            heard, before = len(other.requests), len(one.requests)
            for _ in range(2):  # each door's turn
                assert await asyncio.to_thread(ask, client) == "well met"
            assert (len(one.requests), len(other.requests)) == (before, heard + 2)


async def test_a_stream_whose_router_is_lost_ends_in_a_clear_error(
    endpoints: tuple[tuple[FakeInference, str], tuple[FakeInference, str]],
) -> None:
    """Its beginning is printed already, so that nobody but the client can ask again."""
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
            with pytest.raises(RequestFailed, match=r"its router was lost .*; ask again: the same seed gives the same"):
                await asyncio.to_thread(next, events)


def test_what_a_router_says_is_asked_nowhere_else(
    endpoints: tuple[tuple[FakeInference, str], tuple[FakeInference, str]],
) -> None:
    (one, one_at), (other, other_at) = endpoints
    with InferenceClient(f"{one_at},{other_at}", EndpointAccess()) as client:
        with pytest.raises(RequestFailed, match="unavailable: no replica"):
            ask(client, "lost")
    assert len(one.requests) + len(other.requests) == 1
