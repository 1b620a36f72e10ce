"""Response formats of the two OpenAI endpoints: a choice's text, chunks and logprobs, and vLLM's prompt logprobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from msgspec import Raw

from core.types.prompt_logprobs import PromptLogprobs
from core.types.request import TokenLogprob
from frontend.http.event_stream import JSON, to_json
from frontend.text.answer_events import Detokenizer
from frontend.text.answer_reader import CallText
from frontend.text.completion import Completion
from frontend.text.events import Delta, Finished
from frontend.text.tokenizer import Tokenizer

REASONING = ("reasoning_content", "reasoning")  # DeepSeek's name of thoughts, and the one of vLLM and OpenRouter
_LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity; OpenAI uses this value


class TextForm:
    """Form of /v1/completions."""

    whole = chunk = "text_completion"  # `object` of a whole response, and of a chunk
    id_prefix = "cmpl-"
    is_prompt_shared = False  # whether prompt extensions belong to the response rather than to each choice

    def __init__(
        self, tokenizer: Tokenizer, *, echo: str = "", num_echo_logprobs: int | None = None, has_answer: bool = True
    ) -> None:
        """echo: the prompt's text, if it is repeated. num_echo_logprobs: number of most likely tokens listed for each
        of its tokens; None: no logprobs. has_answer: False: the text is only `echo`."""
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
        """Return the logprobs of deltas. Every token must have one."""
        text_of, tokens = self._tokenizer.token_text, _tokens(deltas)
        return {
            "tokens": [text_of(token_id) for token_id, _ in tokens],
            "token_logprobs": [_finite(logprob.logprob) for _, logprob in tokens],
            "top_logprobs": [
                # Includes the chosen token even if it is not among the most likely, as in OpenAI's API.
                {text_of(token_id): _finite(logprob.logprob)}
                | {text_of(other): _finite(value) for other, value in logprob.top}
                for token_id, logprob in tokens
            ],
            "text_offset": [len(self.echo) + offset for delta in deltas for offset in delta.text_offsets],
        }


class ChatForm:
    """Form of /v1/chat/completions."""

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
        said = self.piece(delta.text_with_rest)
        if delta.thinking:
            said["delta"] |= dict.fromkeys(self._thinking_fields, delta.thinking)
        calls = [{"index": one.number, **_call(one, one.arguments)} for one in delta.calls if one.broken is None]
        if calls:
            said["delta"]["tool_calls"] = calls[:1]
        return [said, *({"delta": {"tool_calls": [call]}} for call in calls[1:])]

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
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


Form: TypeAlias = TextForm | ChatForm  # response format of one endpoint, with the same methods in both


def ending(finished: Finished) -> JSON:
    """Return the finish reason. stop_reason is an extension: the stop string that ended the choice."""
    return {"finish_reason": finished.word, "stop_reason": finished.stop}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


def _tokens(deltas: Sequence[Delta]) -> list[tuple[int, TokenLogprob]]:
    """Return ids and logprobs of tokens that have one."""
    return [(token.token_id, token.logprob) for delta in deltas for token in delta.tokens if token.logprob is not None]


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
    """Return the entry of `tool_calls` for a call, or for a later part of one."""
    if not call.id:
        return {"function": {"arguments": arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


_MANY = 1024  # log-probabilities, some 3 ms of encoding; more go to another thread
_Entry = tuple[int, float, int]  # token id, log-probability, rank


@dataclass(frozen=True, kw_only=True)
class PromptScores:
    """Prompt log-probabilities of a response; None where not requested."""

    listed: list[Any] | None = None  # vLLM's `prompt_logprobs`
    echoed: dict[str, list[Any]] | None = None  # OpenAI's `logprobs` of a repeated prompt

    def before(self, logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
        """Prepend the prompt's log-probabilities to those of an answer."""
        if self.echoed is None:
            return logprobs
        return {name: column + (logprobs[name] if logprobs else []) for name, column in self.echoed.items()}


async def prompt_scores(completion: Completion, form: Form, *, num_listed: int | None) -> PromptScores:
    """Return the prompt's scores, once its completion has yielded events. num_listed: most likely tokens in
    `prompt_logprobs`; None: not requested. Encodes many scores on another thread. Raises CapacityError."""
    if (prompt_logprobs := completion.prompt_logprobs) is None:
        return PromptScores()
    service, num_echoed = completion.service, form.num_echo_logprobs
    writer = _PromptWriter(service.tokenizer, completion.prompt_ids, prompt_logprobs)

    def write() -> PromptScores:
        return PromptScores(
            listed=None if num_listed is None else writer.listed(num_listed),
            echoed=None if num_echoed is None else writer.echoed(num_echoed, echo=form.echo),
        )

    if completion.num_prompt_numbers < _MANY:
        return write()
    return await service.threads.run(completion.request.key_id, write)


@dataclass(frozen=True)
class _PromptWriter:
    """Encoder for one prompt. Each token's scores are encoded to JSON immediately: as Python objects, all of them would
    take a hundred times the memory."""

    tokenizer: Tokenizer
    prompt_ids: Sequence[int]
    prompt_logprobs: PromptLogprobs

    def listed(self, num_top: int) -> list[Any]:
        """Return vLLM's format: null for the first token, then an object keyed by token id for each."""
        return [None, *(Raw(to_json(self._by_id(entries))) for entries in self._entries(num_top))]

    def echoed(self, num_top: int, *, echo: str) -> dict[str, list[Any]]:
        """Return OpenAI's format; the first token's entries are null."""
        logprobs: list[float | None] = [None]
        likeliest: list[Raw | None] = [None]
        for entries in self._entries(num_top):
            logprobs.append(_finite(entries[0][1]))
            likeliest.append(Raw(to_json(self._by_text(entries))))
        return {
            "tokens": [self.tokenizer.token_text(token_id) for token_id in self.prompt_ids],
            "token_logprobs": logprobs,
            "top_logprobs": likeliest,
            "text_offset": self._offsets(echo),
        }

    def _entries(self, num_top: int) -> Iterator[list[_Entry]]:
        """Yield the scores of each token after the first: its own, then the most likely ones."""
        tokens = iter(self.prompt_ids[1:])
        # Converted to lists, because numpy scalars are slow to access one by one.
        for part in self.prompt_logprobs.parts():
            columns = (part.logprobs_P, part.ranks_P, part.top_ids_PK[:, :num_top], part.top_logprobs_PK[:, :num_top])
            for logprob, rank, ids, values in zip(*(column.tolist() for column in columns), strict=True):
                yield [(next(tokens), logprob, rank), *zip(ids, values, range(1, len(ids) + 1), strict=True)]

    def _by_id(self, entries: list[_Entry]) -> dict[str, Any]:
        text_of = self.tokenizer.token_text
        return {
            str(token_id): {"logprob": _finite(value), "rank": rank, "decoded_token": text_of(token_id)}
            for token_id, value, rank in entries
        }

    def _by_text(self, entries: list[_Entry]) -> dict[str, float]:
        """Map texts to log-probabilities. Tokens of the same text keep the highest."""
        logprobs: dict[str, float] = {}
        for token_id, value, _ in entries:
            text = self.tokenizer.token_text(token_id)
            logprobs[text] = max(_finite(value), logprobs.get(text, _LOWEST_LOGPROB))
        return logprobs

    def _offsets(self, echo: str) -> list[int]:
        detokenizer, ends = Detokenizer(self.tokenizer, skip_special_tokens=False), [0]
        for token_id in self.prompt_ids:
            ends.append(ends[-1] + len(detokenizer.add(token_id)))
        # Subtract the prefix that the tokenizer adds before the text.
        num_before = max(0, ends[-1] + len(detokenizer.finish()) - len(echo))
        return [max(0, end - num_before) for end in ends[:-1]]
