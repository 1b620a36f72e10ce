"""One answer's text, as it comes, to what it is made of: thinking, text, and calls of tools."""

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
    """More of one call, in the order of the answer."""

    number: int  # from 0
    id: str = ""  # with its beginning alone, as the name
    name: str = ""
    arguments: str = ""  # JSON, in pieces
    broken: str | None = None  # it was no call after all: all of its text
    rest: str = ""  # what of that has not been said
    at: int = 0  # where in the text beside it this stands

    def goes_on_from(self, last: CallText) -> bool:
        """With more of the same arguments, and nothing else; a call's beginning stays by itself."""
        is_more = self.number == last.number and not self.id and self.broken is None
        return is_more and not last.id and last.broken is None


@dataclass(slots=True)
class AnswerText:
    """What an answer says with one more piece of its text."""

    text: str = ""
    thinking: str = ""
    calls: list[CallText] = field(default_factory=list)


class AnswerReader:
    """Belongs to one choice."""

    def __init__(self, thinking: ThinkingReader | None, calls: CallReader | None, *, is_parallel: bool = True) -> None:
        self.num_calls = 0  # that are whole
        self.is_over = False  # nothing that comes is part of it any more
        self._thinking = thinking
        self._calls = calls
        self._is_parallel = is_parallel

    @classmethod
    def of(cls, chat: Chat, output_format: OutputFormat, prompt: str, *, may_think: bool = True) -> AnswerReader | None:
        """None where the answer is nothing but text. prompt: its end is enough. may_think: False where it keeps to a
        grammar that has no room for that."""
        thinking = calls = None
        if output_format.thinks and may_think:
            thinking = ThinkingReader(is_open=prompt.rstrip().endswith(THINK))
        if chat.tools and (output_format.calls or chat.forced is not None):
            calls = CallReader(_format(chat, output_format), chat.parameters)
        return cls(thinking, calls, is_parallel=chat.is_parallel) if thinking or calls else None

    @property
    def is_thinking(self) -> bool:
        return self._thinking is not None and self._thinking.is_inside

    def thinking_anew(self) -> ThinkingReader | None:
        """What reads the thinking of this answer, at its beginning."""
        return self._thinking.again() if self._thinking else None

    def add(self, text: str) -> AnswerText:
        thought, text = self._thinking.add(text) if self._thinking else ("", text)
        return self._said(thought, self._calls.add(text) if self._calls else [text])

    def finish(self) -> AnswerText:
        """What is left when no more comes."""
        thought, text = self._thinking.finish() if self._thinking else ("", "")
        pieces: list[Piece] = [*self._calls.add(text), *self._calls.finish()] if self._calls else [text]
        return self._said(thought, pieces)

    def _said(self, thought: str, pieces: Iterable[Piece]) -> AnswerText:
        said = AnswerText(thinking=thought)
        for piece in pieces:
            match piece:
                case str():
                    said.text += piece
                case CallBegun(number, name):
                    said.calls.append(CallText(number, id=_call_id(), name=name, at=len(said.text)))
                case CallArguments(number, text):
                    _of(said, number).arguments += text
                case CallBroken(number, raw, rest):
                    said.calls.append(CallText(number, broken=raw, rest=rest, at=len(said.text)))
                case CallEnded():
                    self.num_calls += 1
                    self.is_over = not self._is_parallel
            if self.is_over:
                break
        return said


def _format(chat: Chat, output_format: OutputFormat) -> Format:
    if chat.forced is not None:
        return partial(forced_call, name=chat.forced) if chat.forced else forced_calls
    return CALL_FORMATS[output_format.calls or ""].read


def _of(said: AnswerText, number: int) -> CallText:
    if not said.calls or said.calls[-1].number != number:
        said.calls.append(CallText(number, at=len(said.text)))
    return said.calls[-1]


def _call_id() -> str:
    """Mistral's templates take no id but of nine letters and digits; others take any."""
    return secrets.token_hex(5)[:9]
