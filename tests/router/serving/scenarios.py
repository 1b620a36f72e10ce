"""Scenarios with one fault each, for fake workers in virtual time."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from functools import wraps
from inspect import Signature, signature
from random import Random
from typing import Any

from core.types.request import Role
from tests.router.serving.fake_worker import FakeWorker
from tests.router.serving.serving_model import Client, World
from tests.router.serving.virtual_time import VirtualTimeLoop, pass_time

Scenario = Callable[[World], Awaitable[None]]


async def nothing_happens(world: World) -> None:
    _deploy(world, prefills=1, decodes=1)
    await pass_time(0.1)
    for n in (1, 3):
        world.ask(num_tokens=9, n=n, max_tokens=30)


async def one_of_three_is_stopped(world: World) -> None:
    client = await _running(world, prefills=1, decodes=1, n=3)
    await world.stop(client, 1)
    await pass_time(0.6)
    world.check()


async def the_only_choice_is_stopped(world: World) -> None:
    client = await _running(world, prefills=1, decodes=1, n=1)
    await world.stop(client, 0)


async def the_client_leaves(world: World) -> None:
    client = await _running(world, prefills=1, decodes=1, n=2)
    world.cancel(client)


async def the_decode_replica_drains(world: World) -> None:
    client = await _running(world, prefills=1, decodes=2, n=2)
    _home(world, client).drain()


async def it_drains_while_its_frames_are_slow(world: World) -> None:
    client = await _running(world, prefills=1, decodes=2, n=1)
    home = _home(world, client)
    home.is_slow = True
    home.drain()
    await pass_time(10)


async def the_decode_replica_dies(world: World) -> None:
    client = await _running(world, prefills=1, decodes=2, n=2)
    _home(world, client).kill()


async def the_decode_replica_falls_silent(world: World) -> None:
    client = await _running(world, prefills=1, decodes=2, n=1)
    _home(world, client).fall_silent()
    await pass_time(20)
    assert client.is_over, "the loss was not detected"


async def a_frame_comes_twice(world: World) -> None:
    client = await _running(world, prefills=1, decodes=1, n=2)
    _home(world, client).repeats = True


async def a_frame_is_lost(world: World) -> None:
    client = await _running(world, prefills=1, decodes=2, n=1)
    _home(world, client).loses = True


async def the_prefill_replica_dies(world: World) -> None:
    """The replica dies before it computes anything; another one takes over the handoff."""
    client = await _prefilling(world)
    next(worker for worker in world.workers.values() if worker.role is Role.PREFILL and worker.num_held()).kill()
    await pass_time(10)
    assert client.generation and client.generation.route.attempts == 1, "the decode replica's lease was given up"


async def the_prefill_replica_dies_while_it_ships(world: World) -> None:
    await _prefilling(world)
    while not any(lease.epoch >= 0 for worker in world.workers.values() for lease in worker.leases):
        await pass_time(0.001)
    for worker in world.workers.values():
        if worker.role is Role.PREFILL and worker.num_held():
            worker.kill()


async def the_prefill_replica_dies_while_it_sends_prompt_logprobs(world: World) -> None:
    client = await _prefilling(world, num_prompt_logprobs=2)
    await pass_time(world.random.choice((0.0, 0.001, 0.01, 0.05, 0.2)))
    for worker in world.workers.values():
        if worker.role is Role.PREFILL and worker.num_held():
            worker.kill()
    await pass_time(10)
    assert client.is_over and client.error is None, client.error


async def a_decode_replica_that_computes_the_prompt_dies(world: World) -> None:
    """The replica dies before it sends the prompt log-probabilities, or after; then they are not sent again."""
    _deploy(world, prefills=0, decodes=2)
    await pass_time(0.1)
    clients = [world.ask(num_tokens=9, n=n, max_tokens=30, num_prompt_logprobs=1) for n in (1, 2)]
    await pass_time(world.random.choice((0.001, 0.05, 0.2, 0.5)))
    next(worker for worker in world.workers.values() if worker.num_held() or world.random.random() < 0.5).kill()
    await pass_time(20)
    assert all(client.is_over and client.error is None for client in clients)


async def two_are_full(world: World) -> None:
    _deploy(world, prefills=1, decodes=3)
    await pass_time(0.1)
    decodes = [worker for worker in world.workers.values() if worker.role is Role.DECODE]
    for worker in decodes[:2]:
        worker.num_refusals = 10
    client = world.ask(num_tokens=9, n=1, max_tokens=30)
    await pass_time(10)
    assert client.is_over and client.error is None, f"the third had room: {client.error}"


SCENARIOS: list[Scenario] = [
    *(nothing_happens, one_of_three_is_stopped, the_only_choice_is_stopped, the_client_leaves),
    *(the_decode_replica_drains, it_drains_while_its_frames_are_slow, the_decode_replica_dies),
    *(the_decode_replica_falls_silent, a_frame_comes_twice, a_frame_is_lost, the_prefill_replica_dies),
    *(the_prefill_replica_dies_while_it_ships, the_prefill_replica_dies_while_it_sends_prompt_logprobs),
    *(a_decode_replica_that_computes_the_prompt_dies, two_are_full),
]


def play(scenario: Scenario, seed: int) -> None:
    """Run a scenario. Raises AssertionError if an invariant is violated during the run or at the end."""

    async def run() -> None:
        world = World(Random(seed))
        try:
            await scenario(world)
            await world.settle()
            world.check_empty()
            world.check_forgotten()
        finally:
            await world.close()

    loop = VirtualTimeLoop()
    gc.disable()
    try:
        loop.run_until_complete(run())
    finally:
        gc.enable()
        loop.close()


def in_world(*, seeds: int = 1) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Decorator of an async test that plays in a `world`, once for each seed."""

    def decorated(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @wraps(test)
        def run(**given: Any) -> None:
            for seed in range(seeds):
                play(lambda world: test(world, **given), seed)

        _, *parameters = signature(test).parameters.values()
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorated


def _deploy(world: World, *, prefills: int, decodes: int) -> None:
    for role, number in ((Role.PREFILL, prefills), (Role.DECODE, decodes)):
        for _ in range(number):
            world.add(role)


async def _prefilling(world: World, *, num_prompt_logprobs: int | None = None) -> Client:
    """Start a request, and return once its prompt has been sent to a prefill replica."""
    _deploy(world, prefills=2, decodes=1)
    await pass_time(0.1)
    client = world.ask(num_tokens=9, n=2, max_tokens=30, num_prompt_logprobs=num_prompt_logprobs)
    while not any(worker.num_held() for worker in world.workers.values() if worker.role is Role.PREFILL):
        await pass_time(0.001)
    return client


async def _running(world: World, *, prefills: int, decodes: int, n: int) -> Client:
    """Start a request, and return once every choice has begun."""
    _deploy(world, prefills=prefills, decodes=decodes)
    await pass_time(0.1)
    client = world.ask(num_tokens=9, n=n, max_tokens=300)
    while len(client.received) < n or min(map(len, client.received.values())) < 3:
        assert not client.is_over, client.error
        await pass_time(0.01)
    return client


def _home(world: World, client: Client) -> FakeWorker:
    """Return the worker on which the request decodes."""
    ids = {client.request.id}
    return next(worker for worker in world.workers.values() if ids & {id for id, _ in worker.running()})
