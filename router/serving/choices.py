"""Choices of one attempt: their tokens, joined from the two replicas that serve it.

The first tokens come from the prefill replica (P) and the others from the decode replica (D), over two connections and
so in any order. D's tokens are buffered until both have reported the same epoch of the handoff. Otherwise D may have
started from the KV and first tokens of an abandoned prefill replica.

D also sends tokens and prompt statistics (cached tokens, log-probabilities) over separate connections. No token is
appended before the statistics, or the answer could end without them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from core.types.errors import ClientTooSlow, ClusterError, ContextLengthExceeded, ReplicaLost, TransferError
from core.types.request import FinishReason, SampledToken, finish_reason
from router.serving.request_state import RequestState

logger = logging.getLogger(__name__)


class Choices:
    """Choices of one attempt. Appends every token to the request's state once, in order within each choice.

    Belongs to the event loop.
    """

    def __init__(
        self,
        state: RequestState,
        choices: Sequence[int],
        *,
        has_prefill: bool,
        max_tokens: int,
        may_hold: Callable[[int], bool],
    ) -> None:
        """has_prefill: the first tokens come from a prefill replica. max_tokens: longest sequence of the decode
        replica. may_hold: returns whether some replica decodes sequences longer than the given number of tokens."""
        self._state = state
        self._choices = choices
        self._has_prefill = has_prefill
        self._max_tokens = max_tokens
        self._may_hold = may_hold
        self._is_joined = False
        self._first_epoch: int | None = None  # handoff epoch of P's first tokens
        self._started_epoch: int | None = None  # handoff epoch with which D began
        self.prefill_done = asyncio.Event()  # P's first tokens have arrived; until then D's tokens are buffered
        if not has_prefill:
            self.prefill_done.set()
        self._early: list[tuple[int, Sequence[SampledToken]]] = []  # buffered tokens of D
        # At most one error, dropped when it is raised: its traceback refers to the waiting frame.
        self._errors: list[ClusterError] = []
        self._arrived = asyncio.Event()  # set at each token
        self._ended = asyncio.Event()

    @property
    def unfinished(self) -> list[int]:
        return [choice for choice in self._choices if choice in self._state.unfinished]

    @property
    def has_first(self) -> bool:
        """True once the prefill replica has sent the first tokens."""
        return self._first_epoch is not None

    @property
    def is_decoding(self) -> bool:
        """True once the decode replica has reported that the prompt's KV is present."""
        return self._started_epoch is not None

    async def wait(self) -> None:
        """Wait until all choices have finished. Raises the first error."""
        await self._ended.wait()
        if self._errors:
            raise self._errors.pop()

    async def wait_for(self, choice: int, num_tokens: int) -> None:
        """Wait until a choice has num_tokens tokens, earlier attempts included, or has finished."""
        while choice in self._state.unfinished and len(self._state.tokens[choice]) < num_tokens:
            self._arrived.clear()
            await self._arrived.wait()

    def first(self, tokens: Sequence[SampledToken], *, epoch: int) -> None:
        """Take the first token of each choice from P, which has computed the prompt."""
        self._first_epoch = epoch
        for choice, token in zip(self._choices, tokens, strict=True):
            num_tokens, num_generated = self._lengths(choice, 1)
            if token.finish_reason is not FinishReason.STOP:  # D's size limits the sequence, not P's
                token.finish_reason = finish_reason(
                    token.token_id,
                    num_generated=num_generated,
                    num_tokens=num_tokens,
                    sampling=self._state.request.sampling,
                    max_context=self._max_tokens,
                )
            self._take(choice, [token])
        self._join()
        self.prefill_done.set()

    def started(self, *, epoch: int) -> None:
        """Record that D has the prompt's KV and first tokens, received in this epoch or computed by itself."""
        self._started_epoch = epoch
        self._join()

    def decoded(self, choice: int, tokens: Sequence[SampledToken] | ReplicaLost) -> None:
        """Take tokens that D has generated."""
        if isinstance(tokens, ReplicaLost):
            self.fail(tokens)
        elif self._is_joined:
            self._take(choice, tokens)
        else:
            self._early.append((choice, tokens))

    def finish(self, choice: int) -> None:
        """Mark a choice as finished. Later tokens of it are dropped."""
        self._state.unfinished.discard(choice)
        self._arrived.set()
        if not self.unfinished:
            self._ended.set()

    def fail(self, error: ClusterError) -> None:
        """End the attempt with an error. Its tokens stay valid."""
        self._errors = self._errors or [error]
        self._ended.set()

    def _join(self) -> None:
        if self._is_joined or self._started_epoch is None or (self._has_prefill and self._first_epoch is None):
            return
        if self._has_prefill and self._first_epoch != self._started_epoch:
            first, begun = self._first_epoch, self._started_epoch
            self.fail(
                TransferError(f"decoding began from handoff epoch {begun}, but the client has tokens of epoch {first}")
            )
            return
        self._is_joined = True
        early, self._early = self._early, []
        for choice, tokens in early:
            self._take(choice, tokens)

    def _take(self, choice: int, tokens: Sequence[SampledToken]) -> None:
        if choice not in self._state.unfinished or not tokens:
            return
        if self._state.is_unread:
            return self.fail(
                ClientTooSlow(f"request {self._state.request.id}: too many tokens of its answer are unread")
            )
        is_last = is_cut = False
        for number, token in enumerate(tokens, 1):
            if token.finish_reason:  # drop the tokens after the last one
                is_last, tokens = True, tokens[:number]
                is_cut = token.finish_reason is FinishReason.LENGTH and self._is_cut(choice, number)
                token.finish_reason = None if is_cut else token.finish_reason
                break
        self._state.append(choice, tokens)
        self._arrived.set()
        if is_cut:
            self.fail(ContextLengthExceeded("the sequence fills its replica, and continues on a larger one"))
        elif is_last:
            self.finish(choice)

    def _is_cut(self, choice: int, num_new: int) -> bool:
        """Return whether the choice ends after num_new more tokens only because its replica is full, not others."""
        num_tokens, num_generated = self._lengths(choice, num_new)
        return num_generated < self._state.request.sampling.max_tokens and self._may_hold(num_tokens)

    def _lengths(self, choice: int, num_new: int) -> tuple[int, int]:
        """Return the tokens of the sequence, and those generated, after num_new more."""
        request = self._state.request
        num_tokens = len(request.token_ids) + len(self._state.tokens[choice]) + num_new
        return num_tokens, num_tokens - request.num_prompt_tokens


class AttemptTasks:
    """Tasks of one attempt. Any failure, including an unexpected exception, ends the attempt."""

    def __init__(self, choices: Choices, *, request_id: str) -> None:
        self._choices = choices
        self._request_id = request_id
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._done)
        self._tasks.append(task)
        return task

    async def close(self) -> None:
        """Cancel the running tasks and drop all of them.

        A task's traceback refers to the request and its prompt; that reference cycle would live until the garbage
        collector runs.
        """
        while tasks := self._tasks:
            self._tasks = []
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            logger.error("attempt failed request=%s", self._request_id, exc_info=error)
            self._choices.fail(ClusterError(f"internal error: {error!r}"))
