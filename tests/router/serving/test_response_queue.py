"""What waits for a client is taken together, and its end comes last."""

from __future__ import annotations

import asyncio

import pytest

from core.types.errors import ReplicaLost
from core.types.request import SampledToken
from router.serving.response_queue import Outbox


async def _ids(outbox: Outbox) -> dict[int, list[int]]:
    return {choice: [token.token_id for token in tokens] for choice, tokens in (await anext(outbox, {})).items()}


def _put(outbox: Outbox, choice: int, *ids: int) -> None:
    outbox.put(choice, [SampledToken(token_id=id) for id in ids])


async def test_one_that_waits_has_the_first_token_at_once_and_then_all_that_have_come() -> None:
    outbox = Outbox()
    taking = asyncio.ensure_future(_ids(outbox))
    await asyncio.sleep(0)
    assert not taking.done()
    _put(outbox, 0, 1)
    assert await taking == {0: [1]}
    _put(outbox, 0, 2, 3)
    _put(outbox, 1, 9)
    _put(outbox, 0, 4)
    assert outbox.num_waiting == 4
    assert await _ids(outbox) == {0: [2, 3, 4], 1: [9]} and outbox.num_waiting == 0


async def test_nothing_more_is_the_end() -> None:
    outbox = Outbox()
    _put(outbox, 0, 1)
    outbox.end()
    outbox.end(ReplicaLost("too late"))
    assert [await _ids(outbox) for _ in range(3)] == [{0: [1]}, {}, {}]


async def test_an_error_comes_after_the_tokens_that_came_before_it() -> None:
    outbox = Outbox()
    taking = asyncio.ensure_future(_ids(outbox))
    await asyncio.sleep(0)
    _put(outbox, 0, 1)
    outbox.end(ReplicaLost("lost"))
    outbox.end()
    assert await taking == {0: [1]}
    with pytest.raises(ReplicaLost, match="lost"):
        await anext(outbox)


async def test_where_much_waits_it_comes_in_parts_and_others_have_their_turn_between() -> None:
    outbox, turns = Outbox(), 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    _put(outbox, 0, *range(1000))
    outbox.end()
    working = asyncio.ensure_future(others())
    sizes = []
    while taken := await _ids(outbox):
        sizes.append(len(taken[0]))
    working.cancel()
    assert sum(sizes) == 1000 and max(sizes) < 100 and turns >= len(sizes) - 2
