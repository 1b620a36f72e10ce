"""Parser of one answer's text into thinking, text and tool calls, as it arrives."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile

from core.types.request import Grammar
from frontend.chat.chat import Chat
from frontend.chat.output_format import OutputFormat, may_think
from frontend.parsers.formats import CALL_FORMATS, CallFormat, forced_call, forced_calls, named_id
from frontend.parsers.scanner import CallArguments, CallBegun, CallBroken, CallEnded, CallReader, Format, Piece, Thought
from frontend.parsers.thinking import ThinkingReader


@dataclass(slots=True)
class CallText:
    """Next part of one tool call, in the order of the answer."""

    number: int  # from 0
    id: str = ""  # set in the first part only, as is `name`
    name: str = ""
    arguments: str = ""  # fragment of JSON
    broken: str | None = None  # all text of a malformed call; None: the call is well-formed so far
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
    num_thought: int | None = None  # set if all text of the answer, up to this offset in `text`, was thinking


class AnswerReader:
    """Parser of one choice."""

    def __init__(
        self,
        thinking: ThinkingReader | None,
        calls: CallReader | None,
        *,
        is_parallel: bool = True,
        is_forced: bool = False,
        first_index: int | None = None,
        shows_thinking: bool = False,
    ) -> None:
        """is_forced: a grammar constrains the answer to calls, so text outside of them is dropped. first_index: index
        of the first call's id, which names the call; None: ids are random. shows_thinking: thinking that `calls` parses
        is part of the text."""
        self.num_calls = 0  # completed calls
        self.is_over = False  # the rest of the text is not part of the answer
        self._thinking = thinking
        self._shows_thinking = shows_thinking
        self._calls = calls
        self._is_parallel = is_parallel
        self._is_forced = is_forced
        self._first_index = first_index
        self._behind_call: ThinkingReader | None = None  # of the text behind the last call

    @classmethod
    def of(
        cls, chat: Chat, output_format: OutputFormat, prompt: str, *, grammar: Grammar | None = None
    ) -> AnswerReader | None:
        """Create a reader, or return None for an answer of plain text. prompt: its last characters suffice. grammar:
        constrains the answer."""
        if output_format.frame:
            return cls(
                None,
                CallReader(output_format.frame.read, chat.parameters),
                is_parallel=chat.is_parallel,
                is_forced=chat.forced is not None,
                shows_thinking=output_format.tags is None,
            )
        thinking = calls = None
        kind = CALL_FORMATS.get(output_format.calls or "")
        begins, first = list[str](), tuple[str, ...]()
        if chat.tools and (kind or chat.forced is not None):
            calls = CallReader(_format(chat, kind), chat.parameters)
            begins = _begins(chat, kind)
            first = kind.first if kind else ()
        start = output_format.start(chat, prompt)
        if output_format.tags and may_think(grammar, start):
            if grammar and start == "before":
                start = "after"  # the grammar allows thinking only behind an opening tag
            thinking = ThinkingReader(output_format.tags, start, calls=begins, first=first)
        if not thinking and not calls:
            return None
        return cls(
            thinking,
            calls,
            is_parallel=chat.is_parallel,
            is_forced=chat.forced is not None and bool(calls),
            first_index=chat.num_calls if kind and kind.has_named_ids else None,
        )

    def fresh(self) -> AnswerReader:
        """Return a reader of the same answer in its initial state."""
        thinking, calls = self._thinking and self._thinking.fresh(), self._calls and self._calls.fresh()
        return AnswerReader(
            thinking,
            calls,
            is_parallel=self._is_parallel,
            is_forced=self._is_forced,
            first_index=self._first_index,
            shows_thinking=self._shows_thinking,
        )

    @property
    def is_thinking(self) -> bool:
        if self._calls and self._calls.is_thought:
            return not self._shows_thinking
        return any(reader.is_inside for reader in (self._thinking, self._behind_call) if reader)

    @property
    def is_unopened(self) -> bool:
        """True once a closing tag without an opening one has shown that all text before it is thinking."""
        return self._thinking is not None and self._thinking.is_unopened

    def add(self, text: str) -> AnswerText:
        was_unopened = self.is_unopened
        thought, text = self._thinking.add(text) if self._thinking else ("", text)
        parsed = self._parsed(thought, self._calls.add(text) if self._calls else [text])
        if self.is_unopened == was_unopened:
            return parsed
        if self._calls:  # without a call so far
            parsed.text += "".join(piece for piece in self._calls.finish() if isinstance(piece, str))
            self._calls = self._calls.fresh()
        behind = self.add("")
        for call in behind.calls:
            call.at += len(parsed.text)
        return AnswerText(parsed.text + behind.text, behind.thinking, behind.calls, num_thought=len(parsed.text))

    def finish(self, *, is_cut: bool = False) -> AnswerText:
        """Return the remaining parts at the end of the text. is_cut: the token limit ended it, so an open call stays a
        call, with its arguments so far."""
        thought, text, in_thinking = self._thinking.finish() if self._thinking else ("", "", "")
        if in_thinking:
            assert self._calls
            return self._calls_in_thinking([*self._calls.add(in_thinking), *self._calls.finish()])
        pieces: list[Piece] = [*self._calls.add(text), *self._calls.finish()] if self._calls else [text]
        parsed = self._parsed(thought, takewhile(lambda piece: not (is_cut and isinstance(piece, CallBroken)), pieces))
        self._end_text(parsed)
        return parsed

    def _calls_in_thinking(self, pieces: Sequence[Piece]) -> AnswerText:
        """Return the complete calls of thinking that was never closed, numbered from 0; the rest is thinking."""
        ended = (piece.number for piece in pieces if isinstance(piece, CallEnded))
        numbers = {number: at for at, number in enumerate(ended)}
        thought, calls = "", list[Piece]()
        for piece in pieces:
            match piece:
                case str():
                    thought += piece
                case CallBroken():
                    thought += piece.raw
                case CallBegun() | CallArguments() | CallEnded() if piece.number in numbers:
                    calls.append(replace(piece, number=numbers[piece.number]))
        return self._parsed(thought.rstrip(), calls)

    def _parsed(self, thought: str, pieces: Iterable[Piece]) -> AnswerText:
        parsed = AnswerText(thinking=thought)
        for piece in pieces:
            match piece:
                case Thought(text) if not self._shows_thinking:
                    parsed.thinking += text
                case Thought(text):
                    parsed.text += text
                case str() if self._is_forced:
                    pass
                case str() if self._behind_call:
                    thought, text = self._behind_call.add(piece)
                    parsed.thinking += thought
                    parsed.text += text
                case str():
                    parsed.text += piece
                case CallBegun(number, name):
                    self._end_text(parsed)
                    id = _random_id() if self._first_index is None else named_id(name, self._first_index + number)
                    parsed.calls.append(CallText(number, id=id, name=name, at=len(parsed.text)))
                case CallArguments(number, text):
                    _part_of(parsed, number).arguments += text
                case CallBroken(number, raw, rest) if not self._is_forced:
                    parsed.calls.append(CallText(number, broken=raw, rest=rest, at=len(parsed.text)))
                case CallBroken():
                    self.num_calls = 0  # a stop string cut a forced call: finish_reason is stop, not tool_calls
                case CallEnded():
                    self._behind_call = self._thinking.behind_call() if self._thinking else None
                    self.num_calls += 1
                    self.is_over = not self._is_parallel
            if self.is_over:
                break
        return parsed

    def _end_text(self, parsed: AnswerText) -> None:
        """Add what the reader of the text behind a call still holds."""
        if self._behind_call:
            thought, text, _ = self._behind_call.finish()
            parsed.thinking += thought
            parsed.text += text
            self._behind_call = None


def _format(chat: Chat, kind: CallFormat | None) -> Format:
    if chat.forced is not None:
        return partial(forced_call, name=chat.forced) if chat.forced else forced_calls
    assert kind
    return kind.read


def _begins(chat: Chat, kind: CallFormat | None) -> list[str]:
    """Return the texts with which a call may begin."""
    texts = kind.begins if kind and chat.forced is None else ()
    return [text.replace("NAME", name) for text in texts for name in (chat.parameters if "NAME" in text else [""])]


def _part_of(parsed: AnswerText, number: int) -> CallText:
    if not parsed.calls or parsed.calls[-1].number != number:
        parsed.calls.append(CallText(number, at=len(parsed.text)))
    return parsed.calls[-1]


def _random_id() -> str:
    """Return a random call id of nine alphanumerics, the only form that Mistral's templates accept."""
    return secrets.token_hex(5)[:9]
