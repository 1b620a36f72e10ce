"""How the two endpoints of the OpenAI API write the same things: a choice's text, its pieces, its logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from cluster.words.request import TokenLogprob
from router.text.events import Delta, Finished
from router.text.tokenizer import Tokenizer

JSON = dict[str, Any]

_LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity; OpenAI writes this


class Form(Protocol):
    """How one endpoint writes a choice."""

    whole: str  # the `object` of a whole answer
    chunk: str  # and of a chunk
    id_prefix: str
    is_prompt_shared: bool  # whether prompt_token_ids (an extension) belong to the answer, or to each choice

    def opening(self) -> JSON | None:
        """What the first chunk of a choice says before any text of the model."""
        ...

    def piece(self, text: str) -> JSON:
        """A chunk's text; with "", nothing but the end of the choice is said."""
        ...

    def message(self, text: str) -> JSON:
        """A whole choice's text."""
        ...

    def logprobs(self, deltas: Sequence[Delta]) -> JSON:
        """Of tokens that all have a logprob."""
        ...


class TextForm:
    """/v1/completions"""

    whole = chunk = "text_completion"
    id_prefix = "cmpl-"
    is_prompt_shared = False

    def __init__(self, tokenizer: Tokenizer, *, echo: str = "") -> None:
        """echo: the prompt's text, where the answer is to repeat it."""
        self._tokenizer = tokenizer
        self._echo = echo

    def opening(self) -> JSON | None:
        return {"text": self._echo} if self._echo else None

    def piece(self, text: str) -> JSON:
        return {"text": text}

    def message(self, text: str) -> JSON:
        return {"text": self._echo + text}

    def logprobs(self, deltas: Sequence[Delta]) -> JSON:
        text_of, tokens = self._tokenizer.token_text, _tokens(deltas)
        return {
            "tokens": [text_of(token_id) for token_id, _ in tokens],
            "token_logprobs": [_finite(logprob.logprob) for _, logprob in tokens],
            "top_logprobs": [
                # The chosen token is there even when it is not among the likeliest, as OpenAI has it.
                {text_of(token_id): _finite(logprob.logprob)}
                | {text_of(other): _finite(value) for other, value in logprob.top}
                for token_id, logprob in tokens
            ],
            "text_offset": [len(self._echo) + offset for delta in deltas for offset in delta.text_offsets],
        }


class ChatForm:
    """/v1/chat/completions"""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    is_prompt_shared = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self) -> JSON | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, text: str) -> JSON:
        return {"delta": {"content": text} if text else {}}

    def message(self, text: str) -> JSON:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, deltas: Sequence[Delta]) -> JSON:
        content = [
            self._entry(token_id, logprob.logprob)
            | {"top_logprobs": [self._entry(other, value) for other, value in logprob.top]}
            for token_id, logprob in _tokens(deltas)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> JSON:
        text, raw = self._tokenizer.token_text(token_id), self._tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


def ending(finished: Finished) -> JSON:
    """How a choice has ended. stop_reason is an extension: the stop string that ended it."""
    return {"finish_reason": finished.reason.value, "stop_reason": finished.stop}


def _tokens(deltas: Sequence[Delta]) -> list[tuple[int, TokenLogprob]]:
    """Logprobs were asked for."""
    return [(token.token_id, token.logprob) for delta in deltas for token in delta.tokens if token.logprob is not None]


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
