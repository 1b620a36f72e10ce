"""State of one request, from its arrival to its last token, and the queue of its tokens to the frontend."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from core.types.errors import DeadlineExceeded
from core.types.prompt_logprobs import PromptLogprobs
from core.types.request import SampledToken, SequenceRequest
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
        """Record that the attempt of these choices has failed."""
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
        """Return the request that continues these choices: one with its tokens so far, or several without tokens."""
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
            "resumed request=%s choice=%d pause_ms=%.0f prefill=%s decode=%s tokens=%d cached=%d pulled=%d attempts=%d",
            self.request.id, choice, pause_s * 1e3, route.prefill_replica, route.decode_replica, num_tokens,
            route.cached_tokens, route.fetched_tokens, route.attempts,
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
