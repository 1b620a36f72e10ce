"""Tokens of one attempt, joined from its prefill and its decode replica."""

from __future__ import annotations

import itertools

import pytest

from core.types.errors import ReplicaLost, TransferError
from core.types.request import FinishReason, SampledToken, SequenceRequest
from router.serving.choices import Choices
from router.serving.request_state import RequestState


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
