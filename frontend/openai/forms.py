"""Response formats of the two OpenAI endpoints: a choice's text, chunks and logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from core.types.request import TokenLogprob
from frontend.http.event_stream import JSON
from frontend.text.answer_reader import CallText
from frontend.text.events import Delta, Finished
from frontend.text.tokenizer import Tokenizer

REASONING = ("reasoning_content", "reasoning")  # DeepSeek's name of thoughts, and the one of vLLM and OpenRouter
LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity; OpenAI uses this value


class TextForm:
    """/v1/completions"""

    whole = chunk = "text_completion"  # `object` of a whole response, and of a chunk
    id_prefix = "cmpl-"
    is_prompt_shared = False  # whether prompt extensions belong to the response rather than to each choice

    def __init__(
        self, tokenizer: Tokenizer, *, echo: str = "", num_echo_logprobs: int | None = None, has_answer: bool = True
    ) -> None:
        """echo: the prompt's text, if it is repeated. num_echo_logprobs: most likely tokens listed for each of its
        tokens; None: no logprobs. has_answer: False: only the prompt is returned."""
        self.echo = echo
        self.num_echo_logprobs = num_echo_logprobs
        self.has_answer = has_answer
        self._tokenizer = tokenizer

    def opening(self) -> JSON | None:
        """Return the part of a choice that precedes generated text."""
        return {"text": self.echo} if self.echo or self.num_echo_logprobs is not None else None

    def piece(self, text: str) -> JSON:
        """Return the part with a text; "" is used for the end of the choice."""
        return {"text": text}

    def said(self, delta: Delta) -> list[JSON]:
        """Return the parts of a delta."""
        return [{"text": delta.text}]

    def message(self, whole: WholeChoice) -> JSON:
        """Return a whole choice."""
        return {"text": self.echo + whole.all_of("text")}

    def logprobs(self, deltas: Sequence[Delta]) -> JSON:
        """Return the logprobs of deltas whose tokens all have one."""
        text_of, tokens = self._tokenizer.token_text, _tokens(deltas)
        return {
            "tokens": [text_of(token_id) for token_id, _ in tokens],
            "token_logprobs": [finite(logprob.logprob) for _, logprob in tokens],
            "top_logprobs": [
                # Includes the chosen token even if it is not among the most likely, as in OpenAI's API.
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

    def __init__(self, tokenizer: Tokenizer, *, hides_thinking: bool = False) -> None:
        self._tokenizer = tokenizer
        self._thinking_fields: tuple[str, ...] = () if hides_thinking else REASONING

    def opening(self) -> JSON | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, text: str) -> JSON:
        return {"delta": {"content": text} if text else {}}

    def said(self, delta: Delta) -> list[JSON]:
        """Return the parts of a delta. Each tool call gets its own chunk, because some clients read only a chunk's
        first call."""
        said = self.piece(delta.text_with_broken(is_whole=False))
        if delta.thinking:
            said["delta"] |= dict.fromkeys(self._thinking_fields, delta.thinking)
        calls = [{"tool_calls": [chunk_of(call)]} for call in delta.calls if call.broken is None]
        if calls:
            said["delta"] |= calls[0]
        return [said, *({"delta": call} for call in calls[1:])]

    def message(self, whole: WholeChoice) -> JSON:
        text, thinking, calls = whole.all_of("text"), whole.all_of("thinking"), whole.calls
        message: JSON = {"role": "assistant", "content": text, "refusal": None}
        if thinking:
            message |= dict.fromkeys(self._thinking_fields, thinking)
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
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


Form: TypeAlias = TextForm | ChatForm  # response format of one endpoint, with the same methods in both


def ending(finished: Finished) -> JSON:
    """Return the finish reason. stop_reason is an extension: the stop string that ended the choice."""
    return {"finish_reason": finished.word, "stop_reason": finished.stop}


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _tokens(deltas: Sequence[Delta]) -> list[tuple[int, TokenLogprob]]:
    """Return ids and logprobs of tokens that have one."""
    return [(token.token_id, token.logprob) for delta in deltas for token in delta.tokens if token.logprob is not None]


def chunk_of(call: CallText) -> dict[str, Any]:
    """Return the `tool_calls` entry of a part of a call."""
    more = _call(call, call.arguments) if call.id else {"function": {"arguments": call.arguments}}
    return {"index": call.number, **more}


class WholeChoice:
    """Whole answer in blocks, in order. Text that turned out not to be a call is kept as text."""

    def __init__(self) -> None:
        # Kind of each block (thinking, text or call), pieces of its text, and the first part of a call.
        self.blocks: list[tuple[str, list[str], CallText | None]] = []

    def think(self, thinking: str) -> None:
        self._pieces("thinking").append(thinking)

    def text(self, text: str) -> None:
        self._pieces("text").append(text)

    def end_thinking(self) -> None:
        thought = "".join(piece for _, pieces, _ in self.blocks for piece in pieces).strip()
        self.blocks.clear()
        if thought:
            self.think(thought)

    def call(self, call: CallText) -> None:
        if call.broken is not None:
            self.blocks.pop()  # the last block is this call's: CallBroken comes directly after its arguments
            self.text(call.broken)
        elif call.id:
            self.blocks.append(("call", [call.arguments], call))
        else:
            self._pieces("call").append(call.arguments)

    def all_of(self, kind: str) -> str:
        """Return the concatenated text of all blocks of a kind."""
        return "".join(piece for one, pieces, _ in self.blocks if one == kind for piece in pieces)

    @property
    def calls(self) -> list[JSON]:
        """The calls, as entries of `tool_calls`."""
        return [_call(call, "".join(pieces)) for _, pieces, call in self.blocks if call]

    def _pieces(self, kind: str) -> list[str]:
        if not self.blocks or self.blocks[-1][0] != kind:
            self.blocks.append((kind, [], None))
        return self.blocks[-1][1]


def _call(call: CallText, arguments: str) -> JSON:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
