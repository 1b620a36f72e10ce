"""Parser of one answer's text into thinking, text and tool calls, as it arrives."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from frontend.chat.chat import Chat
from frontend.chat.output_format import OutputFormat
from frontend.parsers.call_reader import CallReader
from frontend.parsers.formats import CALL_FORMATS, Format, forced_call, forced_calls
from frontend.parsers.pieces import CallArguments, CallBegun, CallBroken, CallEnded, Piece
from frontend.parsers.thinking import THINK, ThinkingReader


@dataclass(slots=True)
class CallText:
    """Next part of one tool call, in the order of the answer."""

    number: int  # from 0
    id: str = ""  # set in the first part only, as is `name`
    name: str = ""
    arguments: str = ""  # fragment of JSON
    broken: str | None = None  # set if the text turned out to be no call: all of that text
    rest: str = ""  # the part of `broken` that has not been sent
    at: int = 0  # offset in the accompanying text

    def extends(self, last: CallText) -> bool:
        """Return whether this part only adds arguments to `last`; the first part of a call is never merged."""
        is_more = self.number == last.number and not self.id and self.broken is None
        return is_more and not last.id and last.broken is None


@dataclass(slots=True)
class AnswerText:
    """Parsed parts of one piece of an answer's text."""

    text: str = ""
    thinking: str = ""
    calls: list[CallText] = field(default_factory=list)


class AnswerReader:
    """Parser of one choice."""

    def __init__(self, thinking: ThinkingReader | None, calls: CallReader | None, *, is_parallel: bool = True) -> None:
        self.num_calls = 0  # completed calls
        self.is_over = False  # the rest of the text is not part of the answer
        self._thinking = thinking
        self._calls = calls
        self._is_parallel = is_parallel

    @classmethod
    def of(cls, chat: Chat, output_format: OutputFormat, prompt: str, *, may_think: bool = True) -> AnswerReader | None:
        """Create a reader, or return None for an answer of plain text. prompt: its last characters suffice. may_think:
        False if the answer's grammar has no room for thinking."""
        thinking = calls = None
        if output_format.thinks and may_think:
            thinking = ThinkingReader(is_open=prompt.rstrip().endswith(THINK))
        if chat.tools and (output_format.calls or chat.forced is not None):
            calls = CallReader(_format(chat, output_format), chat.parameters)
        return cls(thinking, calls, is_parallel=chat.is_parallel) if thinking or calls else None

    @property
    def is_thinking(self) -> bool:
        return self._thinking is not None and self._thinking.is_inside

    def new_thinking_reader(self) -> ThinkingReader | None:
        """Return a fresh reader of the thinking of this answer, in its initial state."""
        return self._thinking.fresh() if self._thinking else None

    def add(self, text: str) -> AnswerText:
        thought, text = self._thinking.add(text) if self._thinking else ("", text)
        return self._parsed(thought, self._calls.add(text) if self._calls else [text])

    def finish(self) -> AnswerText:
        """Return the remaining parts at the end of the text."""
        thought, text = self._thinking.finish() if self._thinking else ("", "")
        pieces: list[Piece] = [*self._calls.add(text), *self._calls.finish()] if self._calls else [text]
        return self._parsed(thought, pieces)

    def _parsed(self, thought: str, pieces: Iterable[Piece]) -> AnswerText:
        parsed = AnswerText(thinking=thought)
        for piece in pieces:
            match piece:
                case str():
                    parsed.text += piece
                case CallBegun(number, name):
                    parsed.calls.append(CallText(number, id=_call_id(), name=name, at=len(parsed.text)))
                case CallArguments(number, text):
                    _part_of(parsed, number).arguments += text
                case CallBroken(number, raw, rest):
                    parsed.calls.append(CallText(number, broken=raw, rest=rest, at=len(parsed.text)))
                case CallEnded():
                    self.num_calls += 1
                    self.is_over = not self._is_parallel
            if self.is_over:
                break
        return parsed


def _format(chat: Chat, output_format: OutputFormat) -> Format:
    if chat.forced is not None:
        return partial(forced_call, name=chat.forced) if chat.forced else forced_calls
    return CALL_FORMATS[output_format.calls or ""].read


def _part_of(parsed: AnswerText, number: int) -> CallText:
    if not parsed.calls or parsed.calls[-1].number != number:
        parsed.calls.append(CallText(number, at=len(parsed.text)))
    return parsed.calls[-1]


def _call_id() -> str:
    """Return a random call id of nine alphanumerics, the only form that Mistral's templates accept."""
    return secrets.token_hex(5)[:9]
