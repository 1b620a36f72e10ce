"""What waits for a client is taken together, and its end comes last."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from core.types.errors import ReplicaLost
from core.types.request import SampledToken
from router.serving.response_queue import ResponseQueue


async def _ids(responses: ResponseQueue) -> dict[int, list[int]]:
    return {choice: [token.token_id for token in tokens] for choice, tokens in (await anext(responses, {})).items()}


def _put(responses: ResponseQueue, choice: int, *ids: int) -> None:
    responses.put(choice, [SampledToken(token_id=id) for id in ids])


async def test_one_that_waits_has_the_first_token_at_once_and_then_all_that_have_come() -> None:
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


async def test_nothing_more_is_the_end() -> None:
    responses = ResponseQueue()
    _put(responses, 0, 1)
    responses.end()
    responses.end(ReplicaLost("too late"))
    assert [await _ids(responses) for _ in range(3)] == [{0: [1]}, {}, {}]


async def test_an_error_comes_after_the_tokens_that_came_before_it() -> None:
    responses = ResponseQueue()
    taking = asyncio.ensure_future(_ids(responses))
    await asyncio.sleep(0)
    _put(responses, 0, 1)
    responses.end(ReplicaLost("lost"))
    responses.end()
    assert await taking == {0: [1]}
    with pytest.raises(ReplicaLost, match="lost"):
        await anext(responses)


async def test_where_much_waits_it_comes_in_parts_and_others_have_their_turn_between() -> None:
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


class FakeSink:
    """Takes what comes, and says `answer`, or raises it."""

    def __init__(self) -> None:
        self.answer: bool | Exception = True
        self.taken: list[dict[int, list[int]]] = []

    def __call__(self, choice: int, tokens: Sequence[SampledToken]) -> bool:
        self.taken.append({choice: [token.token_id for token in tokens]})
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_a_sink_gets_tokens_only_while_the_iteration_waits() -> None:
    responses, sink = ResponseQueue(), FakeSink()
    responses.sink = sink
    _put(responses, 0, 1)
    assert await _ids(responses) == {0: [1]} and sink.taken == []
    taking = asyncio.ensure_future(_ids(responses))
    await asyncio.sleep(0)
    _put(responses, 0, 2, 3)
    _put(responses, 1, 9)
    assert sink.taken == [{0: [2, 3]}, {1: [9]}] and responses.num_waiting == 0
    sink.answer = False
    _put(responses, 0, 4)
    _put(responses, 0, 5)  # before whoever iterates has had his turn
    assert await taking == {0: [5]} and sink.taken[2:] == [{0: [4]}]


async def test_a_sink_can_wake_the_iteration_before_the_end() -> None:
    responses, sink = ResponseQueue(), FakeSink()
    responses.sink, sink.answer = sink, False
    taking = asyncio.ensure_future(anext(responses))
    await asyncio.sleep(0)
    _put(responses, 0, 1)
    responses.end(ReplicaLost("lost"))
    assert await taking == {} and sink.taken == [{0: [1]}]
    with pytest.raises(ReplicaLost, match="lost"):
        await anext(responses)


async def test_an_error_of_a_sink_is_raised_by_the_iteration() -> None:
    responses, sink = ResponseQueue(), FakeSink()
    responses.sink, sink.answer = sink, ZeroDivisionError()
    taking = asyncio.ensure_future(anext(responses))
    await asyncio.sleep(0)
    _put(responses, 0, 1)
    with pytest.raises(ZeroDivisionError):
        await taking


async def test_no_token_follows_one_that_a_sink_could_not_take() -> None:
    responses, sink = ResponseQueue(), FakeSink()
    responses.sink, sink.answer = sink, ZeroDivisionError()
    taking = asyncio.ensure_future(anext(responses))
    await asyncio.sleep(0)
    _put(responses, 0, 1)
    _put(responses, 0, 2)  # before whoever iterates has had his turn
    with pytest.raises(ZeroDivisionError):
        await taking
