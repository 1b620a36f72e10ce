"""Choices of one attempt: their tokens, joined from the two replicas that serve it.

The first tokens come from the prefill replica and the others from the decode replica, over two connections and so in
any order. Tokens of the decode replica are kept back until both replicas have named the same epoch of the handoff: a
prefill replica that was given up may have landed its KV after all, and decoding then began with *its* first tokens.

Of the decode replica, tokens and the account of the prompt (how much of it was cached, the log-probabilities of its
tokens) come in two calls as well: no token is appended before the account, or the answer could end without it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from core.types.errors import ClientTooSlow, ClusterError, ReplicaLost, TransferError
from core.types.request import SampledToken
from router.serving.request_state import RequestState

logger = logging.getLogger(__name__)


class Choices:
    """Appends every token to the request's state once, those of a choice in order. Belongs to the event loop."""

    def __init__(self, state: RequestState, choices: Sequence[int], *, has_prefill: bool) -> None:
        """has_prefill: the first tokens come from a prefill replica."""
        self._state = state
        self._choices = choices
        self._has_prefill = has_prefill
        self._is_joined = False
        self._first_epoch: int | None = None  # of the handoff; P sends it with the first tokens
        self._started_epoch: int | None = None  # and by D, when it began
        self.prefill_spoke = asyncio.Event()  # tokens of D are kept back until then
        if not has_prefill:
            self.prefill_spoke.set()
        self._early: list[tuple[int, Sequence[SampledToken]]] = []  # of D, not joined yet
        self._errors: list[
            ClusterError
        ] = []  # one at most, until it is raised: its traceback refers to the waiting frame
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
        """True once the decode replica has reported that it has the prompt's KV."""
        return self._started_epoch is not None

    async def wait(self) -> None:
        """Until all have finished. Raises the error that came first."""
        await self._ended.wait()
        if self._errors:
            raise self._errors.pop()

    async def wait_for(self, choice: int, num_tokens: int) -> None:
        """Until a choice has so many tokens, of all attempts, or has finished."""
        while choice in self._state.unfinished and len(self._state.tokens[choice]) < num_tokens:
            self._arrived.clear()
            await self._arrived.wait()

    def first(self, tokens: Sequence[SampledToken], *, epoch: int) -> None:
        """P has computed the prompt: the first token of each choice."""
        self._first_epoch = epoch
        for choice, token in zip(self._choices, tokens, strict=True):
            self._take(choice, [token])
        self._join()
        self.prefill_spoke.set()

    def started(self, *, epoch: int) -> None:
        """Note that D has the KV and the first tokens that came with it, or has computed them itself."""
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
        """It needs no more tokens; none will be appended."""
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
                TransferError(f"decoding began with the first tokens of epoch {begun}, the client has those of {first}")
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
            return self.fail(ClientTooSlow(f"request {self._state.request.id}: too much of its answer is unread"))
        is_last = False
        for number, token in enumerate(tokens, 1):
            if token.finish_reason:  # what follows is none of this choice
                is_last, tokens = True, tokens[:number]
                break
        self._state.append(choice, tokens)
        self._arrived.set()
        if is_last:
            self.finish(choice)


class AttemptTasks:
    """Tasks of one attempt. The failure of any of them ends the attempt, an internal error included."""

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
        """Cancel the tasks that still run. None is kept: a task's traceback refers to the request and its prompt, and
        such a cycle would live until the garbage collector runs."""
        while tasks := self._tasks:
            self._tasks = []
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            logger.error("attempt failed request=%s", self._request_id, exc_info=error)
            self._choices.fail(ClusterError(f"internal error: {error!r}"))
