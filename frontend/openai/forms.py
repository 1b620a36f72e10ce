"""How the two endpoints of the OpenAI API write the same things: a choice's text, its pieces, its logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from core.types.request import TokenLogprob
from frontend.http.json_response import JSON
from frontend.openai.prompt_logprobs import finite
from frontend.openai.tool_calls import WholeChoice, chunk_of
from frontend.text.events import Delta, Finished
from frontend.text.tokenizer import Tokenizer


class Form(Protocol):
    """How one endpoint writes a choice."""

    whole: str  # the `object` of a whole answer
    chunk: str  # and of a chunk
    id_prefix: str
    is_prompt_shared: bool  # whether what extensions say of the prompt belongs to the answer, or to each choice
    has_answer: bool  # False: the prompt alone is repeated
    echo: str  # the prompt's text, where the answer is to repeat it
    num_echo_logprobs: int | None  # and so many likeliest tokens with its own; None: nothing of them

    def opening(self) -> JSON | None:
        """What the first chunk of a choice says before any text of the model."""
        ...

    def piece(self, text: str) -> JSON:
        """A chunk's text; with "", nothing but the end of the choice is said."""
        ...

    def said(self, delta: Delta) -> list[JSON]:
        """All that is said, also what is more than text: in one chunk, or in several where calls follow each other.
        There are clients that look at a chunk's first call alone."""
        ...

    def message(self, whole: WholeChoice) -> JSON:
        """A whole choice."""
        ...

    def logprobs(self, deltas: Sequence[Delta]) -> JSON:
        """Of tokens that all have a logprob."""
        ...


class TextForm:
    """/v1/completions"""

    whole = chunk = "text_completion"
    id_prefix = "cmpl-"
    is_prompt_shared = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        echo: str = "",
        num_echo_logprobs: int | None = None,
        has_answer: bool = True,
    ) -> None:
        self.echo = echo
        self.num_echo_logprobs = num_echo_logprobs
        self.has_answer = has_answer
        self._tokenizer = tokenizer

    def opening(self) -> JSON | None:
        return {"text": self.echo} if self.echo or self.num_echo_logprobs is not None else None

    def piece(self, text: str) -> JSON:
        return {"text": text}

    def said(self, delta: Delta) -> list[JSON]:
        return [{"text": delta.text}]

    def message(self, whole: WholeChoice) -> JSON:
        return {"text": self.echo + whole.text}

    def logprobs(self, deltas: Sequence[Delta]) -> JSON:
        text_of, tokens = self._tokenizer.token_text, _tokens(deltas)
        return {
            "tokens": [text_of(token_id) for token_id, _ in tokens],
            "token_logprobs": [finite(logprob.logprob) for _, logprob in tokens],
            "top_logprobs": [
                # The chosen token is there even when it is not among the likeliest, as OpenAI has it.
                {text_of(token_id): finite(logprob.logprob)}
                | {text_of(other): finite(value) for other, value in logprob.top}
                for token_id, logprob in tokens
            ],
            "text_offset": [len(self.echo) + offset for delta in deltas for offset in delta.text_offsets],
        }


class ChatForm:
    """/v1/chat/completions"""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    is_prompt_shared = True
    has_answer = True
    echo = ""
    num_echo_logprobs: int | None = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self) -> JSON | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, text: str) -> JSON:
        return {"delta": {"content": text} if text else {}}

    def said(self, delta: Delta) -> list[JSON]:
        said = self.piece(delta.text_with_broken(is_whole=False))
        if delta.thinking:
            said["delta"]["reasoning_content"] = delta.thinking
        calls = [{"tool_calls": [chunk_of(call)]} for call in delta.calls if call.broken is None]
        if calls:
            said["delta"] |= calls[0]
        return [said, *({"delta": call} for call in calls[1:])]

    def message(self, whole: WholeChoice) -> JSON:
        message: JSON = {"role": "assistant", "content": whole.text, "refusal": None}
        if whole.thinking:
            message["reasoning_content"] = whole.thinking
        if whole.calls:
            message |= {"content": whole.text or None, "tool_calls": whole.calls}
        return {"message": message}

    def logprobs(self, deltas: Sequence[Delta]) -> JSON:
        content = [
            self._entry(token_id, logprob.logprob)
            | {"top_logprobs": [self._entry(other, value) for other, value in logprob.top]}
            for token_id, logprob in _tokens(deltas)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> JSON:
        text, raw = self._tokenizer.token_text(token_id), self._tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}


def ending(finished: Finished) -> JSON:
    """How a choice has ended. stop_reason is an extension: the stop string that ended it."""
    return {"finish_reason": finished.word, "stop_reason": finished.stop}


def _tokens(deltas: Sequence[Delta]) -> list[tuple[int, TokenLogprob]]:
    """Logprobs were asked for."""
    return [(token.token_id, token.logprob) for delta in deltas for token in delta.tokens if token.logprob is not None]
