"""What waits for a client is taken together, and its end comes last."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

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


class FakeTaker:
    """Takes what comes, and says `answer`, or raises it."""

    def __init__(self) -> None:
        self.answer: bool | Exception = True
        self.taken: list[dict[int, list[int]]] = []

    def __call__(self, choice: int, tokens: Sequence[SampledToken]) -> bool:
        self.taken.append({choice: [token.token_id for token in tokens]})
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_a_taker_has_what_comes_while_the_iteration_waits_and_only_then() -> None:
    outbox, taker = Outbox(), FakeTaker()
    outbox.taker = taker
    _put(outbox, 0, 1)
    assert await _ids(outbox) == {0: [1]} and taker.taken == []
    taking = asyncio.ensure_future(_ids(outbox))
    await asyncio.sleep(0)
    _put(outbox, 0, 2, 3)
    _put(outbox, 1, 9)
    assert taker.taken == [{0: [2, 3]}, {1: [9]}] and outbox.num_waiting == 0
    taker.answer = False
    _put(outbox, 0, 4)
    _put(outbox, 0, 5)  # before whoever iterates has had his turn
    assert await taking == {0: [5]} and taker.taken[2:] == [{0: [4]}]


async def test_a_taker_that_wants_more_is_heard_before_the_end() -> None:
    outbox, taker = Outbox(), FakeTaker()
    outbox.taker, taker.answer = taker, False
    taking = asyncio.ensure_future(anext(outbox))
    await asyncio.sleep(0)
    _put(outbox, 0, 1)
    outbox.end(ReplicaLost("lost"))
    assert await taking == {} and taker.taken == [{0: [1]}]
    with pytest.raises(ReplicaLost, match="lost"):
        await anext(outbox)


async def test_what_a_taker_raises_happens_to_whoever_iterates() -> None:
    outbox, taker = Outbox(), FakeTaker()
    outbox.taker, taker.answer = taker, ZeroDivisionError()
    taking = asyncio.ensure_future(anext(outbox))
    await asyncio.sleep(0)
    _put(outbox, 0, 1)
    with pytest.raises(ZeroDivisionError):
        await taking


async def test_what_comes_behind_what_a_taker_could_not_take_is_not_given() -> None:
    outbox, taker = Outbox(), FakeTaker()
    outbox.taker, taker.answer = taker, ZeroDivisionError()
    taking = asyncio.ensure_future(anext(outbox))
    await asyncio.sleep(0)
    _put(outbox, 0, 1)
    _put(outbox, 0, 2)  # before whoever iterates has had his turn
    with pytest.raises(ZeroDivisionError):
        await taking
