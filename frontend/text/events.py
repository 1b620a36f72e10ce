"""Events of a completion: deltas of each choice, its end, and a summary of the whole request."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Protocol

from core.types.request import FinishReason, SampledToken
from frontend.text.answer_reader import AnswerText, CallText
from router.generation import RequestRoute


class AnswerParts(Protocol):
    """Receiver of an answer's parts, in order."""

    def think(self, thinking: str, /) -> None: ...

    def text(self, text: str, /) -> None: ...

    def end_thinking(self) -> None:
        """Note that all text so far was thinking; a stream cannot take it back."""

    def call(self, call: CallText, /) -> None: ...


@dataclass(slots=True)
class Delta:
    """Tokens of one choice that arrived together, and the text that can be sent now. The text may be empty, or include
    that of earlier tokens."""

    choice: int
    text: str
    tokens: list[SampledToken]  # at least one; all have a logprob, or none has
    text_offsets: list[int]  # characters of the choice before each token
    thinking: str = ""
    calls: list[CallText] = field(default_factory=list)
    num_thought: int | None = None  # set if all text of the choice, up to this offset in `text`, was thinking

    @property
    def has_logprobs(self) -> bool:
        return self.tokens[0].logprob is not None

    @property
    def has_more_than_text(self) -> bool:
        """True if it has thinking or calls beside text."""
        return bool(self.thinking or self.calls) or self.num_thought is not None

    @property
    def num_continued(self) -> int:
        """Number of call parts that belong to a call of an earlier delta; they precede this one's thinking."""
        return next((at for at, call in enumerate(self.calls) if call.id), len(self.calls))

    def add(self, parsed: AnswerText) -> None:
        for call in parsed.calls:
            call.at += len(self.text)
            if self.calls and call.extends(self.calls[-1]):
                self.calls[-1].arguments += call.arguments
            else:
                self.calls.append(call)
        if parsed.num_thought is not None:
            self.num_thought = len(self.text) + parsed.num_thought
        self.text += parsed.text
        self.thinking += parsed.thinking

    def write(self, parts: AnswerParts) -> None:
        """Pass everything but tokens and logprobs to `parts`."""
        if not self.has_more_than_text:
            if self.text:
                parts.text(self.text)
            return
        for call in self.calls[: self.num_continued]:
            parts.call(call)
        if self.thinking:
            parts.think(self.thinking)
        at = self.num_thought or 0
        if at:
            parts.text(self.text[:at])
        if self.num_thought is not None:
            parts.end_thinking()
        for call in self.calls[self.num_continued :]:
            if call.at > at:
                parts.text(self.text[at : call.at])
                at = call.at
            parts.call(call)
        if at < len(self.text):
            parts.text(self.text[at:])

    @property
    def text_with_rest(self) -> str:
        """The text including the unsent rest of broken calls."""
        text = self.text
        for call in reversed(self.calls):
            if call.broken is not None:
                text = text[: call.at] + call.rest + text[call.at :]
        return text


@dataclass(frozen=True)
class Finished:
    """End of a choice; once per choice."""

    choice: int
    reason: FinishReason  # STOP or LENGTH
    stop: str | None = None  # the stop string that ended it, if one did
    num_calls: int = 0  # of tools

    @property
    def word(self) -> str:
        """Finish reason in OpenAI's terms, which the gRPC API uses as well."""
        return "tool_calls" if self.num_calls and self.reason is FinishReason.STOP else self.reason.value


@dataclass(frozen=True, kw_only=True)
class TokenUsage:
    prompt_tokens: int = 0
    completion_tokens: int = 0  # of all choices, each up to the token that ended it
    reasoning_tokens: int = 0  # part of completion_tokens: thinking
    cached_tokens: int = 0  # prompt tokens whose KV was reused
    accepted_prediction_tokens: int = 0  # part of completion_tokens: accepted draft tokens
    rejected_prediction_tokens: int = 0  # rejected draft tokens

    def __add__(self, other: TokenUsage) -> TokenUsage:
        mine, others = asdict(self), asdict(other)
        return TokenUsage(**{name: mine[name] + others[name] for name in mine})


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Summary of the request; once, after every choice has finished."""

    usage: TokenUsage
    route: RequestRoute
    ttft_s: float  # from the request's arrival
    itl_s: float  # mean inter-token latency; 0 if no choice has two tokens


Event = Delta | Finished | Summary
