"""Relay of a request whose client leaves early, and of one whose router reads late."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest

from core.types.request import Role, Sampling, SequenceRequest
from router.generation import RequestRoute
from router.serving.reservations import Reservations
from tests.router.serving.serving_world import World
from tests.router.serving.virtual_time import VirtualTimeLoop, pass_time


def test_an_answer_counts_even_if_the_client_leaves_with_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoints leave after the last finish reason. The length prediction still needs the answer."""
    counted: list[int] = []

    def count(reservations: Reservations, num_tokens: Iterable[int]) -> None:
        counted.extend(num_tokens)

    monkeypatch.setattr(Reservations, "finished", count)

    async def ask() -> int:
        world = World(Random(0))
        for role in Role:
            world.add(role)
        await pass_time(0.1)
        request = SequenceRequest(
            id="r", token_ids=tuple(range(9)), num_prompt_tokens=9, sampling=Sampling(max_tokens=20)
        )
        num_tokens = 0
        async with world.core.start(request) as generation:
            async for arrived in generation:
                num_tokens += len(arrived[0])
                if arrived[0][-1].finish_reason:
                    break
        await world.close()
        return num_tokens

    loop = VirtualTimeLoop()
    try:
        num_tokens = loop.run_until_complete(ask())
    finally:
        loop.close()
    assert counted == [num_tokens]


@pytest.mark.parametrize("max_tokens", [1, 2, 40])
def test_unread_tokens_are_read_before_a_call_counts_as_lost(max_tokens: int) -> None:
    """An overloaded router sees the end of a call long before it reads the tokens that have arrived. The first tokens
    may arrive after those of the decode replica, and may be the only ones."""

    async def ask(seed: int) -> tuple[int, RequestRoute]:
        world = World(Random(seed))
        for role in Role:
            world.add(role)
            world.add(role)
        await pass_time(0.1)
        for worker in world.workers.values():
            worker.frame_s = 1.0
        sampling = Sampling(max_tokens=max_tokens)
        request = SequenceRequest(id="r", token_ids=tuple(range(9)), num_prompt_tokens=9, sampling=sampling)
        async with world.core.start(request) as generation:
            num_tokens = sum([len(arrived[0]) async for arrived in generation])
        await world.close()
        return num_tokens, generation.route

    for seed in range(8):
        loop = VirtualTimeLoop()
        try:
            num_tokens, route = loop.run_until_complete(ask(seed))
            assert loop.time() > 4 or max_tokens < 40, "it was slow"
        finally:
            loop.close()
        assert (num_tokens, route.attempts, route.migrations) == (max_tokens, 1, 0)
