"""Every scenario alone, and faults planted in the router, which the checks must detect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from core.types.errors import ReplicaLost
from core.types.handoff import Handoff
from core.types.request import SampledToken, SequenceRequest
from router.serving.attempt import Attempt
from router.serving.core import Relay
from router.serving.decode_streams import ChoiceMove, DecodeStreams
from router.serving.replicas import Replica, TokenSink
from router.serving.request_state import AttemptTasks, Choices, RequestState
from router.serving.reservations import PromptReservation, Reservation, Reservations
from tests.router.serving.fake_worker import FakeWorker
from tests.router.serving.scenarios import SCENARIOS, Scenario, play
from tests.support.grids import quick

_SEEDS = range(5)

Fault = tuple[type, str, Any]


async def _drop_stop(self: Attempt, choice: int) -> None:
    self._choices.finish(choice)


async def _wait_for_nothing(self: Choices, choice: int, num_tokens: int) -> None:
    pass


def _continue_one_token_early(self: RequestState, choices: Sequence[int], *, stream: int = 0) -> SequenceRequest:
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


def _same_epoch(self: FakeWorker, request: SequenceRequest, *, handoff: Handoff | None = None, **others: Any) -> Any:
    return _PREFILL(self, request, handoff=replace(handoff, epoch=0) if handoff else None, **others)


def _ignore_loss(self: Replica, stream: int, sink: TokenSink) -> None:
    _SUBSCRIBE(self, stream, lambda tokens: sink(tokens) if isinstance(tokens, list) else None)


async def _keep_tasks(self: AttemptTasks) -> None:
    tasks = list(self._tasks)
    await _CLOSE(self)
    self._tasks.extend(tasks)


def _deliver_twice(self: Replica, stream: int, sink: TokenSink) -> None:
    def twice(tokens: list[SampledToken] | ReplicaLost) -> None:
        sink(tokens)
        sink(tokens)

    _SUBSCRIBE(self, stream, twice)


async def _ignore_stop(self: Attempt, choice: int) -> None:
    pass


_CLOSE, _CONTINUATION = AttemptTasks.close, RequestState.continuation
_FOLLOW, _PREFILL, _SUBSCRIBE = ChoiceMove.follow, FakeWorker.prefill, Replica.subscribe

_FAULTS: dict[str, Fault] = {
    "a stop is not sent to the replica": (Attempt, "stop", _drop_stop),
    "a stop is ignored": (Attempt, "stop", _ignore_stop),
    "a move does not wait for the source's last tokens": (Choices, "wait_for", _wait_for_nothing),
    "tokens after a move come twice": (ChoiceMove, "follow", _append_twice),
    "another attempt continues one token too early": (RequestState, "continuation", _continue_one_token_early),
    "decoded tokens do not wait for the first ones": (Choices, "decoded", _do_not_join),
    "another prefill replica gets the same epoch": (FakeWorker, "prefill", _same_epoch),
    "an ended choice is not marked as finished": (Choices, "finish", lambda self, choice: None),
    "the loss of a replica is not noticed": (Replica, "subscribe", _ignore_loss),
    "a reservation is not released": (Reservation, "end", lambda self: None),
    "a prompt is expected for ever": (PromptReservation, "end", lambda self, is_computed=False: None),
    "streams stay subscribed": (DecodeStreams, "close", lambda self: None),
    "tokens of a frame are delivered twice": (Replica, "subscribe", _deliver_twice),
    "tasks of an attempt are not cleaned up": (AttemptTasks, "close", _keep_tasks),
    "a failed replica is chosen again": (Relay, "_culprits", lambda self: set()),
    "no other prefill replica is tried": (Reservations, "another_prefill", lambda self, request, pair, avoid: None),
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_every_choice_gets_its_tokens_in_scenario(scenario: Scenario) -> None:
    for seed in _SEEDS[:2]:  # test_serving.py draws more
        play(scenario, seed)


# The search for most others takes seconds.
_QUICK = ("a reservation is not released", "tokens of a frame are delivered twice", "tokens after a move come twice")


@pytest.mark.parametrize("name", quick(_FAULTS, _QUICK))
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, planted = _FAULTS[name]
    monkeypatch.setattr(owner, attribute, planted)
    with pytest.raises((AssertionError, ExceptionGroup)):
        for scenario in SCENARIOS:
            for seed in _SEEDS:
                play(scenario, seed)
