"""Reservation of one request: its concurrency slot before its body is read, its tokens once they are known."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from core.types.errors import ClusterError, RequestError
from frontend.access.limiter import Limiter, Reservation, rejection
from frontend.text.completion import Completion

Held: TypeAlias = tuple[Limiter, Reservation]


class RequestContext:
    """Admitted request with its reservation. Created by Limits, which settles it."""

    def __init__(
        self, place: Held | None, take_tokens: Callable[[RequestContext, int], Awaitable[Reservation]]
    ) -> None:
        """place: None if the key has no limits."""
        self.place = place
        self.charging: asyncio.Task[Held] | None = None  # pending charge, if the tokens taken ahead were too few
        self.is_charged = False
        self._take_tokens = take_tokens
        self._completions: Sequence[Completion] = ()

    @property
    def used_tokens(self) -> int:
        return sum(one.used_tokens for one in self._completions)

    def check(self, num_tokens: int) -> None:
        """Check cheaply, before tokenizing, that the key can pay for `num_tokens` tokens.

        Raises RateLimited, or RequestError if the key never can.
        """
        if self.place is None or (taken := self.place[1]).key.tpm is None:
            return
        if num_tokens > taken.key.tpm:
            raise RequestError(
                f"prompt: needs at least {num_tokens} tokens; this API key allows {taken.key.tpm} tokens a minute",
                param="prompt",
            )
        if num_tokens > taken.key.tpm - taken.with_tokens(0).status.num_tokens:
            retry_s = taken.status.tokens_reset_s
            raise rejection(taken.key, "tokens", retry_after_s=retry_s, status=taken.status)

    async def charge(self, completions: Sequence[Completion]) -> Mapping[str, str]:
        """Take the maximum number of tokens of these completions, once; unused ones are returned after the request.
        Return the rate-limit headers.

        Raises RateLimited, or RequestError if the request exceeds the key's tokens per minute. Answers without
        reserved tokens are shortened to fit.
        """
        self._completions = completions
        if self.place is None:
            return {}
        _, taken = self.place
        try:
            if taken.key.tpm is not None:
                _fit(completions, taken.key.tpm)
                taken = await self._take_tokens(self, sum(one.most_tokens for one in completions))
        except ClusterError as error:
            for one in completions[:1]:  # one request counts once
                one.reject(error)
            raise
        return taken.status.headers(taken.key)


def _fit(completions: Sequence[Completion], tpm: int) -> None:
    """Shorten answers without reserved tokens, so that all completions fit into `tpm` tokens. Raises RequestError."""
    num_prompt = sum(len(one.prompt_ids) for one in completions)
    if num_prompt > tpm:
        raise RequestError(
            f"prompt: has {num_prompt} tokens; this API key allows {tpm} tokens a minute", param="prompt"
        )
    if sum(one.most_tokens for one in completions) <= tpm:
        return
    unbounded = [one for one in completions if not one.request.reserved_tokens]
    named = sum(one.max_answer_tokens for one in completions if one.request.reserved_tokens)
    room = (tpm - num_prompt - named) // max(1, sum(one.num_choices for one in unbounded))
    if not unbounded or room < max(1, *(one.request.min_tokens for one in unbounded)):
        param = completions[0].request.max_tokens_field
        raise RequestError(
            f"{param}: prompts and answers together exceed {tpm} tokens a minute, the limit of this API key",
            param=param,
        )
    for one in unbounded:
        one.shorten_answers(room)
