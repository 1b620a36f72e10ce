"""What a request leaves behind when its client is quick to leave."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest

from cluster.words.request import Role, Sampling, SequenceRequest
from router.serving.dispatch import Dispatch
from tests.router.serving.serving_world import World
from tests.router.serving.virtual_time import VirtualTimeLoop, pass_time


def test_an_answer_is_counted_though_its_client_leaves_with_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doors do: they need nothing after the last finish reason. Answers still to come are predicted by these."""
    counted: list[int] = []

    def count(dispatch: Dispatch, num_tokens: Iterable[int]) -> None:
        counted.extend(num_tokens)

    monkeypatch.setattr(Dispatch, "finished", count)

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
