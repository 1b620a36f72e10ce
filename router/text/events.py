"""What a completion yields: deltas of each choice, its end, and at last an account of the whole."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.words.request import FinishReason, SampledToken
from router.generation import RequestRoute


@dataclass(frozen=True)
class Delta:
    """One token of one choice, and the text that may go out now: often none, or also that of the tokens before it."""

    choice: int
    text: str
    token: SampledToken
    text_offset: int  # characters of the choice before this token


@dataclass(frozen=True)
class Finished:
    """A choice has ended; once per choice."""

    choice: int
    reason: FinishReason  # STOP or LENGTH
    stop: str | None = None  # the stop string that ended it, if one did


@dataclass(frozen=True, kw_only=True)
class TokenUsage:
    prompt_tokens: int = 0
    completion_tokens: int = 0  # of all choices, each up to the token that ended it
    cached_tokens: int = 0  # prompt tokens whose KV was not computed again

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Once, after every choice has finished."""

    usage: TokenUsage
    route: RequestRoute
    ttft_s: float  # from the request's arrival
    itl_s: float  # mean time between two tokens of a choice; 0 where none has two


Event = Delta | Finished | Summary
