"""What a completion yields: deltas of each choice, its end, and at last an account of the whole."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.words.request import FinishReason, SampledToken
from router.generation import RequestRoute


@dataclass(slots=True)
class Delta:
    """Tokens of one choice that have come together, mostly one, and the text that may go out now: often none, or also
    that of tokens before them."""

    choice: int
    text: str
    tokens: list[SampledToken]  # at least one; all have a logprob, or none has
    text_offsets: list[int]  # characters of the choice before each

    @property
    def has_logprobs(self) -> bool:
        return self.tokens[0].logprob is not None


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
