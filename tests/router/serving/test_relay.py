"""Tokens of a request on their way from its replicas to its client."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from core.types.errors import ReplicaLost, TransferError
from core.types.request import FinishReason, Role, SampledToken, Sampling, SequenceRequest
from router.serving.request_state import Choices, RequestState, ResponseQueue
from router.serving.reservations import Reservations
from tests.router.serving import scenarios
from tests.router.serving.serving_model import World
from tests.router.serving.virtual_time import pass_time


@scenarios.in_world()
async def test_an_answer_counts_even_if_the_client_leaves_with_the_last_token(world: World) -> None:
    """Endpoints leave after the last finish reason. The length prediction still needs the answer."""
    for role in Role:
        world.add(role)
    await pass_time(0.1)
    request = SequenceRequest(id="r", token_ids=tuple(range(9)), num_prompt_tokens=9, sampling=Sampling(max_tokens=20))
    counted, num_tokens = list[int](), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reservations, "finished", lambda self, counts: counted.extend(counts))
        async with world.core.start(request) as generation:
            async for arrived in generation:
                num_tokens += len(arrived[0])
                if arrived[0][-1].finish_reason:
                    break
        await pass_time(1)
    assert counted == [num_tokens]


@pytest.mark.parametrize("max_tokens", [1, 2, 40])
@scenarios.in_world(seeds=8)
async def test_unread_tokens_are_read_before_a_call_counts_as_lost(world: World, max_tokens: int) -> None:
    """An overloaded router sees the end of a call long before it reads the tokens that have arrived. The first tokens
    may arrive after those of the decode replica, and may be the only ones."""
    for role in (*Role, *Role):
        world.add(role)
    await pass_time(0.1)
    for worker in world.workers.values():
        worker.frame_s = 1.0
    sampling = Sampling(max_tokens=max_tokens)
    request = SequenceRequest(id="r", token_ids=tuple(range(9)), num_prompt_tokens=9, sampling=sampling)
    async with world.core.start(request) as generation:
        num_tokens = sum([len(arrived[0]) async for arrived in generation])
    assert asyncio.get_running_loop().time() > 4 or max_tokens < 40, "it was slow"
    assert (num_tokens, generation.route.attempts, generation.route.migrations) == (max_tokens, 1, 0)
    for worker in world.workers.values():
        worker.frame_s = 0.0


def _token(id: int, *, is_last: bool = False) -> SampledToken:
    return SampledToken(token_id=id, finish_reason=FinishReason.LENGTH if is_last else None)


def _choices(number: int = 1, *, has_prefill: bool = True) -> tuple[Choices, RequestState]:
    request = SequenceRequest(id="r", token_ids=(1,), num_prompt_tokens=1, choices=tuple(range(number)))
    state = RequestState(request)
    return Choices(state, request.choices, has_prefill=has_prefill, max_tokens=100, may_hold=lambda num: False), state


async def _emitted(state: RequestState) -> dict[int, list[int]]:
    """Return the tokens sent to the client since the last call."""
    taken = await anext(state.responses) if state.responses.num_waiting else {}
    return {choice: [token.token_id for token in tokens] for choice, tokens in taken.items()}


@pytest.mark.parametrize("order", list(itertools.permutations(["first", "started", "decoded"])))
async def test_tokens_are_joined_in_any_order_of_arrival(order: tuple[str, ...]) -> None:
    choices, state = _choices(2)
    for event in order:
        if event == "first":
            choices.first([_token(10), _token(20)], epoch=3)
            first = await _emitted(state)
        elif event == "started":
            choices.started(epoch=3)
        else:
            choices.decoded(0, [_token(11), _token(12, is_last=True)])
            choices.decoded(1, [_token(21, is_last=True)])
    await choices.wait()
    assert (first[0][0], first[1][0]) == (10, 20), "a first token waits only for its own replica"
    rest = await _emitted(state)
    assert first[0] + rest.get(0, []) == [10, 11, 12] and first[1] + rest.get(1, []) == [20, 21]


async def test_tokens_of_another_epoch_are_never_sent() -> None:
    choices, state = _choices()
    choices.started(epoch=0)  # with the KV of an abandoned prefill replica
    choices.decoded(0, [_token(98), _token(99, is_last=True)])
    choices.first([_token(10)], epoch=1)
    with pytest.raises(TransferError, match=r"epoch 0, .* of epoch 1"):
        await choices.wait()
    assert await _emitted(state) == {0: [10]}


async def test_no_answer_ends_before_the_prompt_statistics() -> None:
    choices, state = _choices(has_prefill=False)
    choices.decoded(0, [_token(10), _token(11, is_last=True)])  # frames arrived before the call's event
    assert not await _emitted(state) and choices.unfinished
    choices.started(epoch=0)
    await choices.wait()
    assert await _emitted(state) == {0: [10, 11]}


async def test_a_stopped_choice_gets_no_more_tokens() -> None:
    choices, state = _choices(2, has_prefill=False)
    choices.started(epoch=0)
    choices.decoded(0, [_token(10)])
    choices.finish(0)
    choices.decoded(0, [_token(11)])
    choices.decoded(1, [_token(20, is_last=True)])
    await choices.wait()
    assert await _emitted(state) == {0: [10], 1: [20]}
    await choices.wait_for(0, 5)  # finished, so it returns at once


async def test_the_first_error_is_raised() -> None:
    choices, _ = _choices()
    choices.fail(ReplicaLost("one"))
    choices.fail(ReplicaLost("another"))
    with pytest.raises(ReplicaLost, match="one"):
        await choices.wait()


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
