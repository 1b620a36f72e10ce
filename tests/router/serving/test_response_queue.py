"""Bundling of waiting tokens, and the end of the queue."""

from __future__ import annotations

import asyncio

import pytest

from core.types.errors import ReplicaLost
from core.types.request import SampledToken
from router.serving.request_state import ResponseQueue


async def _ids(responses: ResponseQueue) -> dict[int, list[int]]:
    return {choice: [token.token_id for token in tokens] for choice, tokens in (await anext(responses, {})).items()}


def _put(responses: ResponseQueue, choice: int, *ids: int) -> None:
    responses.put(choice, [SampledToken(token_id=id) for id in ids])


async def test_a_waiting_consumer_gets_the_first_token_then_all_queued_ones() -> None:
    responses = ResponseQueue()
    taking = asyncio.ensure_future(_ids(responses))
    await asyncio.sleep(0)
    assert not taking.done()
    _put(responses, 0, 1)
    assert await taking == {0: [1]}
    _put(responses, 0, 2, 3)
    _put(responses, 1, 9)
    _put(responses, 0, 4)
    assert responses.num_waiting == 4
    assert await _ids(responses) == {0: [2, 3, 4], 1: [9]} and responses.num_waiting == 0


async def test_end_stops_the_iteration() -> None:
    responses = ResponseQueue()
    _put(responses, 0, 1)
    responses.end()
    responses.end(ReplicaLost("too late"))
    assert [await _ids(responses) for _ in range(3)] == [{0: [1]}, {}, {}]


async def test_an_error_is_raised_after_the_earlier_tokens() -> None:
    responses = ResponseQueue()
    taking = asyncio.ensure_future(_ids(responses))
    await asyncio.sleep(0)
    _put(responses, 0, 1)
    responses.end(ReplicaLost("lost"))
    responses.end()
    assert await taking == {0: [1]}
    with pytest.raises(ReplicaLost, match="lost"):
        await anext(responses)


async def test_many_tokens_come_in_bundles_and_others_get_turns_between() -> None:
    responses, turns = ResponseQueue(), 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    _put(responses, 0, *range(1000))
    responses.end()
    working = asyncio.ensure_future(others())
    sizes = []
    while taken := await _ids(responses):
        sizes.append(len(taken[0]))
    working.cancel()
    assert sum(sizes) == 1000 and max(sizes) < 100 and turns >= len(sizes) - 2
