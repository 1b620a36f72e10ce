"""Local decodes on prefill replicas while decode replicas are full or gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from core.types.request import OFFLINE, Role
from router.serving.replicas import Replica
from tests.router.serving import scenarios
from tests.router.serving.fake_worker import FakeWorker
from tests.router.serving.serving_model import QUEUE_S, Client, World
from tests.router.serving.virtual_time import pass_time, until

_MAX_RUNNING, _MAX_LOCAL = 6, 3


def _seen(world: World, worker: FakeWorker) -> Replica:
    replica = world.replicas.get(worker.name)
    assert replica
    return replica


async def _deployed(world: World, *, share: float = 0.5) -> tuple[FakeWorker, FakeWorker]:
    world.local_decode_share = share
    prefill, decode = world.add(Role.PREFILL), world.add(Role.DECODE)
    await pass_time(0.1)
    return prefill, decode


def _ask(world: World, number: int, *, max_tokens: int = 300, priority: int = 0) -> list[Client]:
    return [world.ask(num_tokens=9, n=1, max_tokens=max_tokens, priority=priority) for _ in range(number)]


@asynccontextmanager
async def _full(world: World, *, share: float = 0.5) -> AsyncIterator[tuple[FakeWorker, FakeWorker]]:
    """Keep the decode replica full until the block ends."""
    prefill, decode = await _deployed(world, share=share)
    reserved = (0, _MAX_RUNNING, 0, _MAX_RUNNING)
    _seen(world, decode).reserve(*reserved)
    yield prefill, decode
    _seen(world, decode).reserve(*(-amount for amount in reserved))


def _waiting(world: World) -> int:
    return world.core.admission.num_waiting


@scenarios.in_world()
async def test_prefill_replicas_answer_while_decode_replicas_are_full(world: World) -> None:
    async with _full(world) as (prefill, _):
        local_decodes = _ask(world, _MAX_LOCAL + 1)
        await until(lambda: sum(bool(client.received) for client in local_decodes) == _MAX_LOCAL)
        assert len(prefill.running()) <= _MAX_LOCAL and _seen(world, prefill).promised_streams == _MAX_LOCAL
        assert _waiting(world) == 1, "beyond its share it computes prompts only"
        assert b"\nxpyd_local_decodes_total 3.0" in world.metrics.render()


@scenarios.in_world()
async def test_decisions_show_the_cost_of_waiting(world: World) -> None:
    async with _full(world) as (prefill, decode):
        [local_decode] = _ask(world, 1)
        await until(lambda: local_decode.received)
    [attempt] = world.core.decisions.explain(local_decode.request.id)[local_decode.request.id]
    taken, *others = attempt["options"]
    assert (taken["prefill"], taken["decode"], taken["wait_s"]) == (None, prefill.name, 0.0)
    assert {(option["decode"], option["wait_s"] > 0) for option in others} == {(decode.name, True)}
    assert taken["cost_s"] < others[0]["cost_s"] and attempt["replicas"].keys() == {prefill.name, decode.name}


@scenarios.in_world()
async def test_a_request_waits_if_waiting_is_cheaper(world: World) -> None:
    async with _full(world) as (prefill, _):
        _seen(world, prefill).reserve(0, 20, 0, 0)  # queued prompts that a local decode would delay
        _ask(world, 1)
        await pass_time(0.05)
        assert _waiting(world) == 1 and not prefill.running()
        _seen(world, prefill).reserve(0, -20, 0, 0)


@scenarios.in_world()
async def test_prefill_replicas_answer_however_long_decode_replicas_are_missing(world: World) -> None:
    world.local_decode_share = 0.5
    world.add(Role.PREFILL)
    await pass_time(0.1)
    availability = world.core.replicas.availability
    assert availability.look() is None, "a replica answers"
    await pass_time(QUEUE_S + 1)
    [client] = _ask(world, 1)
    await until(lambda: client.is_over)
    assert client.error is None


@pytest.mark.parametrize("why", ["no share", "no overflow", "offline"])
@scenarios.in_world()
async def test_requests_without_local_decode_wait_for_a_decode_replica(world: World, why: str) -> None:
    world.answers_overflow = why != "no overflow"
    async with _full(world, share=0.0 if why == "no share" else 0.5) as (prefill, _):
        clients = _ask(world, 2, priority=OFFLINE if why == "offline" else 0)
        await pass_time(0.1)
        assert not prefill.running() and not any(client.received for client in clients)


@scenarios.in_world()
async def test_prefill_replicas_answer_if_there_is_no_decode_replica(world: World) -> None:
    world.local_decode_share = 0.5
    prefill = world.add(Role.PREFILL)
    await pass_time(0.1)
    assert world.core.replicas.may_answer()
    clients = _ask(world, 2 * _MAX_LOCAL)
    await until(lambda: len(prefill.running()) == _MAX_LOCAL)
    await until(lambda: all(client.is_over for client in clients))
    assert not any(client.error for client in clients)


@scenarios.in_world()
async def test_the_model_is_available_while_prefill_replicas_answer(world: World) -> None:
    world.local_decode_share = 0.5
    prefill = world.add(Role.PREFILL)
    await until(lambda: world.replicas.usable(Role.PREFILL))
    assert world.core.replicas.availability.look() is None
    prefill.drain()
    await until(lambda: world.core.replicas.availability.look() is not None)


@scenarios.in_world()
async def test_answers_of_a_lost_last_decode_replica_continue_on_prefill_replicas(world: World) -> None:
    world.answers_overflow = False
    prefill, decode = await _deployed(world)
    clients = _ask(world, _MAX_LOCAL)
    await until(lambda: all(len(client.received.get(0, [])) > 2 for client in clients))
    decode.kill()
    await until(lambda: len(prefill.running()) == _MAX_LOCAL)
    await until(lambda: all(client.is_over for client in clients))
    assert not any(client.error for client in clients)


@scenarios.in_world()
async def test_a_local_decode_continues_elsewhere_if_its_replica_dies(world: World) -> None:
    async with _full(world) as (prefill, _):
        [local_decode] = _ask(world, 1)
        await until(lambda: len(local_decode.received.get(0, [])) > 2)
        other = world.add(Role.PREFILL)
        await until(lambda: _seen(world, other).is_usable)
        prefill.kill()
        await until(lambda: local_decode.is_over)
    assert local_decode.error is None and local_decode.generation and local_decode.generation.route.migrations == 1


@pytest.mark.parametrize("drains", [False, True])
@scenarios.in_world()
async def test_a_local_decode_moves_to_a_decode_replica_with_room(world: World, drains: bool) -> None:
    """Moves both because the prefill replica drains and because a decode replica has room."""
    async with _full(world) as (prefill, _):
        local_decodes = _ask(world, _MAX_LOCAL, max_tokens=900)
        await until(lambda: all(local_decode.received for local_decode in local_decodes))
        routes = [local_decode.generation.route for local_decode in local_decodes if local_decode.generation]
        if drains:
            prefill.drain()
        fresh = world.add(Role.DECODE)
        await until(lambda: fresh.name in {route.decode_replica for route in routes})
    assert {route.attempts for route in routes} == {1}, "one went on without"
