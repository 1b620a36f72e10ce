"""State of one request, from its arrival to its last token, with the choices of its current attempts."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from core.types.errors import (
    ClientTooSlow,
    ClusterError,
    ContextLengthExceeded,
    DeadlineExceeded,
    ReplicaLost,
    TransferError,
)
from core.types.prompt_logprobs import PromptLogprobs
from core.types.request import FinishReason, SampledToken, SequenceRequest, finish_reason
from core.types.timeline import Timeline
from router.generation import RequestRoute

logger = logging.getLogger(__name__)

# Maximum number of unread tokens, each top log-probability counted as one more: about 4 MB. Clients that read at all
# stay far below it.
_MAX_UNREAD = 16 * 1024
_TOGETHER = 64  # tokens; about 1 ms of work for an endpoint


class RequestState:
    """Tokens and progress of a request. Owned by its Relay, on the event loop.

    Attempts append to it, several at a time if they serve different choices.
    """

    def __init__(self, request: SequenceRequest) -> None:
        self.request = request
        self.route = RequestRoute()
        self.life = Timeline()
        self.tokens: dict[int, list[int]] = {choice: [] for choice in request.choices}
        self.prompt_logprobs: PromptLogprobs | None = None  # set before the first token, if requested
        self.unfinished = set(request.choices)
        self.responses = ResponseQueue()
        self._now = asyncio.get_running_loop().time
        self._started_at = self._now()
        self._first_at: float | None = None  # time of the first token of any choice
        self._max_unread = _MAX_UNREAD // (1 + (request.sampling.num_logprobs or 0))  # tokens
        self._lost_at: dict[int, float] = {}  # time of failure of interrupted choices, until their next token

    def append(self, choice: int, tokens: Sequence[SampledToken]) -> None:
        """Append tokens of an unfinished choice and queue them for the client."""
        ids = self.tokens[choice]
        for token in tokens:
            ids.append(token.token_id)
            if token.drafts:
                self.route.drafts.add(token.drafts)
        if self._first_at is None:
            self._first_at = self._now()
        self.responses.put(choice, tokens)
        if self._lost_at and (lost_at := self._lost_at.pop(choice, None)) is not None:
            self._log_pause(choice, self._now() - lost_at)

    @property
    def is_unread(self) -> bool:
        """True if more tokens wait for the client than allowed."""
        return self.responses.num_waiting > self._max_unread

    def lost(self, choices: Sequence[int]) -> None:
        """Record that the attempt of `choices` has failed."""
        self._lost_at = {choice: self._now() for choice in choices if self.tokens[choice]} | self._lost_at

    def num_tokens(self, choices: Sequence[int]) -> int:
        return sum(len(self.tokens[choice]) for choice in choices)

    def remaining_s(self) -> float | None:
        """Return the seconds until the request's deadline, at least 0; None without a deadline."""
        if self.request.deadline_s is None:
            return None
        return max(0.0, self.request.deadline_s - (self._now() - self._started_at))

    def spread_s(self) -> tuple[float, float]:
        """Return (time to first token, mean inter-token latency) of an answer that has just finished."""
        now, num_tokens = self._now(), max(len(tokens) for tokens in self.tokens.values())
        first_at = now if self._first_at is None else self._first_at
        return first_at - self._started_at, (now - first_at) / max(1, num_tokens - 1)

    def check_deadline(self) -> None:
        """Raise DeadlineExceeded if the request's deadline has passed."""
        deadline_s = self.request.deadline_s
        if deadline_s is not None and self.remaining_s() == 0:
            raise DeadlineExceeded(f"request {self.request.id}: not finished within {deadline_s:g} s")

    def continuation(self, choices: Sequence[int], *, stream: int = 0) -> SequenceRequest:
        """Return the request that continues `choices`: one choice with its tokens so far, or several without tokens."""
        return replace(
            self.request,
            token_ids=self.request.token_ids + tuple(self.tokens[choices[0]]),
            choices=tuple(choices),
            stream=stream,
            num_prompt_logprobs=self.request.num_prompt_logprobs if self.prompt_logprobs is None else None,
            deadline_s=self.remaining_s(),
        )

    def _log_pause(self, choice: int, pause_s: float) -> None:
        route, num_tokens = self.route, len(self.request.token_ids) + len(self.tokens[choice])
        logger.info(
            "resumed request=%s choice=%d pause_ms=%.0f prefill=%s decode=%s tokens=%d cached=%d fetched=%d "
            "attempts=%d", self.request.id, choice, pause_s * 1e3, route.prefill_replica, route.decode_replica,
            num_tokens, route.cached_tokens, route.fetched_tokens, route.attempts,
        )  # fmt: skip


class ResponseQueue:
    """Queue of one request's tokens; each iteration returns up to 64 waiting tokens.

    Belongs to the event loop, and has one consumer.
    """

    def __init__(self) -> None:
        self.num_waiting = 0  # tokens
        self._bundles: deque[dict[int, list[SampledToken]]] = deque()  # by choice; all but the last are full
        self._num_in_last = 0
        self._is_over = False
        # At most one error, dropped when it is raised: its traceback refers to this queue.
        self._errors: list[Exception] = []
        self._loop = asyncio.get_running_loop()
        # Set while the consumer waits. An Event would cost twice as much per token.
        self._waking: asyncio.Future[None] | None = None

    def put(self, choice: int, tokens: Sequence[SampledToken]) -> None:
        """Append one or more tokens of a choice."""
        for token in tokens:
            if not self._bundles or self._num_in_last == _TOGETHER:
                self._bundles.append({})
                self._num_in_last = 0
            self._bundles[-1].setdefault(choice, []).append(token)
            self._num_in_last += 1
        self.num_waiting += len(tokens)
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """Close the queue. Idempotent; the first error wins."""
        if not self._is_over:
            self._is_over = True
            self._errors = [error] if error else []
            self._wake()

    def __aiter__(self) -> ResponseQueue:
        return self

    async def __anext__(self) -> dict[int, list[SampledToken]]:
        """Return at least one token, by choice. After the last token, raises the queue's error once, if it has one.

        Between two full bundles it yields to the event loop, so that other requests get their turn.
        """
        if len(self._bundles) > 1:
            await asyncio.sleep(0)
        if not self._bundles and not self._is_over:
            self._waking = self._loop.create_future()
            try:
                await self._waking
            finally:
                self._waking = None
        if not self._bundles:
            if self._errors:
                raise self._errors.pop()
            raise StopAsyncIteration
        bundle = self._bundles.popleft()
        self.num_waiting -= sum(map(len, bundle.values()))
        return bundle

    def _wake(self) -> None:
        if self._waking and not self._waking.done():
            self._waking.set_result(None)


class Choices:
    """Choices of one attempt. Appends every token to the request's state once, in order within each choice.

    The first tokens come from the prefill replica (P) and the others from the decode replica (D), over two connections
    and so in any order. D's tokens are buffered until both have reported the same epoch of the handoff. Otherwise D may
    have started from the KV and first tokens of an abandoned prefill replica.

    D sends tokens and prompt statistics (cached tokens, log-probabilities) over different connections. No token is
    appended before the statistics have arrived, or the answer could end without them. Belongs to the event loop.
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
        """Return whether num_new more tokens fill the replica and so end the choice, while another could hold more."""
        num_tokens, num_generated = self._lengths(choice, num_new)
        return num_generated < self._state.request.sampling.max_tokens and self._may_hold(num_tokens)

    def _lengths(self, choice: int, num_new: int) -> tuple[int, int]:
        """Return the number of tokens of the sequence, and of generated ones, after num_new more."""
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
