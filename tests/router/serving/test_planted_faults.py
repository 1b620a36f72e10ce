"""Each kind of misfortune alone; and faults that are planted in the router, none of which may go unnoticed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cluster.words.request import SampledToken, SequenceRequest
from router.serving.attempt import Attempt
from router.serving.booking import Booking
from router.serving.choices import Choices
from router.serving.dispatch import Dispatch
from router.serving.move import ChoiceMove
from router.serving.places import Places
from router.serving.replica import Replica
from router.serving.request_state import RequestState
from tests.router.serving.scenarios import SCENARIOS, Scenario, play

_SEEDS = range(5)

Fault = tuple[type, str, Any]


async def _stop_is_not_told(self: Attempt, choice: int) -> None:
    self._choices.finish(choice)


async def _wait_for_nothing(self: Choices, choice: int, num_tokens: int) -> None:
    pass


def _go_on_a_token_early(self: RequestState, choices: Sequence[int], *, stream: int = 0) -> SequenceRequest:
    request = _CONTINUATION(self, choices, stream=stream)
    had_some = len(request.token_ids) > len(self.request.token_ids)
    return replace(request, token_ids=request.token_ids[:-1]) if had_some else request


def _append_twice(self: ChoiceMove, sink: Any) -> None:
    early = list(self._early)
    _FOLLOW(self, sink)
    for tokens in early:
        sink(tokens)


def _do_not_join(self: Choices, choice: int, tokens: list[SampledToken]) -> None:
    for token in tokens:
        self._take(choice, token)


def _same_epoch(self: Attempt, prefill: Replica, handoff: Any) -> Any:
    return _CALL_PREFILL(self, prefill, replace(handoff, epoch=0) if handoff else None)


def _lost_without_a_word(self: Places, choice: int, tokens: Any) -> None:
    if isinstance(tokens, list):
        self._choices.decoded(choice, tokens)


async def _stop_is_not_noticed(self: Attempt, choice: int) -> None:
    pass


def _book_twice(self: Booking, to: Replica | None) -> None:
    if to and self._replica:
        self._replica = None
    _MOVE(self, to)


async def _read_all_frames(self: Replica) -> None:
    async for frame in self.worker.frames():
        self._take(frame)


_CONTINUATION, _MOVE = RequestState.continuation, Booking.move
_FOLLOW, _CALL_PREFILL = ChoiceMove.follow, Attempt._call_prefill

_FAULTS: dict[str, Fault] = {
    "a stop is not told": (Attempt, "stop", _stop_is_not_told),
    "a stop is not even noticed": (Attempt, "stop", _stop_is_not_noticed),
    "a move does not wait for the source's last tokens": (Choices, "wait_for", _wait_for_nothing),
    "tokens after a move come twice": (ChoiceMove, "follow", _append_twice),
    "another attempt goes on a token too early": (RequestState, "continuation", _go_on_a_token_early),
    "the first tokens are not waited for": (Choices, "decoded", _do_not_join),
    "another prefill replica gets the same epoch": (Attempt, "_call_prefill", _same_epoch),
    "a choice that has ended is not struck off": (Choices, "finish", lambda self, choice: None),
    "a lost replica is not heard of": (Places, "_take", _lost_without_a_word),
    "a booking is not given back": (Booking, "end", lambda self: None),
    "a booking stays behind when its request moves": (Booking, "move", _book_twice),
    "streams stay subscribed": (Places, "close", lambda self: None),
    "a frame that is repeated counts": (Replica, "_read_frames", _read_all_frames),
    "who has failed is chosen again": (Attempt, "blamed", property(lambda self: set())),
    "no other prefill replica is asked": (Dispatch, "another_prefill", lambda self, request, pair, avoid: None),
}


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """Thousands of planned losses need not be logged."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_every_choice_gets_its_tokens_when(scenario: Scenario) -> None:
    for seed in _SEEDS:
        play(scenario, seed)


@pytest.mark.parametrize("name", _FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, planted = _FAULTS[name]
    monkeypatch.setattr(owner, attribute, planted)
    with pytest.raises((AssertionError, ExceptionGroup)):
        for scenario in SCENARIOS:
            for seed in _SEEDS:
                play(scenario, seed)
