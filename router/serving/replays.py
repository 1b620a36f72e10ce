"""Answers given once more, on each revision of a deployment that is being updated: do they agree?

Where two revisions are to give the same tokens, a request that has just been answered is asked again on each of them,
for the first few tokens, after all others and one at a time. The old revision is asked, too, for rounding may change an
answer there as well: what counts is whether the new one's differ more often. Nothing is kept but the two counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Set
from dataclasses import replace

from core.types.errors import ClusterError
from core.types.request import OFFLINE, SequenceRequest
from router.routing.revisions import Revisions
from router.serving.admission import Admission
from router.serving.attempt import Attempt
from router.serving.request_state import RequestState
from router.serving.reservations import Pair, Reservations

logger = logging.getLogger(__name__)

_TOKENS = 32
_REPLAY_S = 20.0  # of both
_PAUSE_S = 0.25


class Replays:
    """Of one router. Lives on its event loop."""

    def __init__(
        self,
        admission: Admission,
        reservations: Reservations,
        revisions: Revisions,
        *,
        begin: Callable[[RequestState, SequenceRequest, Pair, Set[str]], Attempt],
    ) -> None:
        self._admission = admission
        self._reservations = reservations
        self._revisions = revisions
        self._begin = begin
        self._task: asyncio.Task[None] | None = None

    def offer(self, state: RequestState) -> None:
        """A request that has been answered: it is asked again, unless another one is just now."""
        revisions = self._revisions
        is_alike = revisions.is_split and len({one.tokens for one in revisions.all}) == 1
        if is_alike and len(state.request.choices) == 1 and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._replay(state))

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _replay(self, state: RequestState) -> None:
        """On each revision, or on none: where one cannot be asked, the others' answers say nothing."""
        revisions = self._revisions
        numbers = [one.number for one in revisions.all]
        (choice,) = state.request.choices
        given = state.tokens[choice][:_TOKENS]
        request = _shortened(state.request, len(given))
        try:
            async with asyncio.timeout(_REPLAY_S):
                answers = {number: await self._ask(request, number) for number in numbers}
        except (ClusterError, TimeoutError) as error:
            logger.debug("request=%s is not compared: %s", request.id, error)
            return
        for number, answer in answers.items():
            counts = revisions.count(number)
            counts.replayed += 1
            if answer != given[: len(answer)] or len(answer) < len(given):
                counts.other_tokens += 1
                logger.info("request=%s revision=%d answers otherwise", request.id, number)
        await asyncio.sleep(_PAUSE_S)

    async def _ask(self, request: SequenceRequest, number: int) -> list[int]:
        """Raises ClusterError."""
        (choice,) = request.choices
        state = RequestState(request)
        async with self._admission.admit(request, only=number) as pair:
            try:
                stream = self._reservations.replicas.new_streams(1)
                asked = state.continuation((choice,), stream=stream)
                await self._begin(state, asked, pair, frozenset()).run()
            finally:
                self._reservations.release(pair)
        return state.tokens[choice]


def _shortened(request: SequenceRequest, num_tokens: int) -> SequenceRequest:
    """So many tokens of its answer, once more."""
    sampling = request.sampling
    least = min(sampling.min_tokens, num_tokens)
    return replace(
        request,
        id=f"{request.id}-replay",
        sampling=replace(sampling, max_tokens=num_tokens, min_tokens=least, num_logprobs=None),
        num_prompt_logprobs=None,
        priority=OFFLINE,
        deadline_s=None,
    )
