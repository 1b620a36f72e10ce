"""Parser of one answer's text into thinking, text and tool calls, as it arrives."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
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


@dataclass(eq=False)
class AnswerReader:
    """Parser of one choice."""

    thinking: ThinkingReader | None
    calls: CallReader | None
    _: KW_ONLY
    is_parallel: bool = True
    is_forced: bool = False  # a grammar constrains the answer to calls, so text outside of them is dropped
    first_index: int | None = None  # index of the first call's id, which names the call; None: ids are random
    shows_thinking: bool = False  # thinking that `calls` parses is part of the text
    num_calls: int = field(default=0, init=False)  # completed calls
    is_over: bool = field(default=False, init=False)  # the rest of the text is not part of the answer
    _behind_call: ThinkingReader | None = field(default=None, init=False)  # of the text behind the last call

    @classmethod
    def of(
        cls, chat: Chat, output_format: OutputFormat, prompt: str, *, grammar: Grammar | None = None
    ) -> AnswerReader | None:
        """Create a reader, or return None for an answer of plain text. prompt: its last characters suffice. grammar:
        constrains the answer."""
        is_forced, is_parallel, frame = chat.forced is not None, chat.is_parallel, output_format.frame
        if frame:
            calls, shows = CallReader(frame.read, chat.parameters), output_format.tags is None
            return cls(None, calls, is_parallel=is_parallel, is_forced=is_forced, shows_thinking=shows)
        thinking = reader = None
        kind = CALL_FORMATS.get(output_format.calls or "")
        begins, first = list[str](), tuple[str, ...]()
        if chat.tools and (kind or is_forced):
            reader = CallReader(_format(chat, kind), chat.parameters)
            begins = _begins(chat, kind)
            first = kind.first if kind else ()
        start = output_format.start(chat, prompt)
        if output_format.tags and may_think(grammar, start):
            if grammar and start == "before":
                start = "after"  # the grammar allows thinking only behind an opening tag
            thinking = ThinkingReader(output_format.tags, start, calls=begins, first=first)
        if not thinking and not reader:
            return None
        index = chat.num_calls if kind and kind.has_named_ids else None
        is_forced = is_forced and reader is not None
        return cls(thinking, reader, is_parallel=is_parallel, is_forced=is_forced, first_index=index)

    def fresh(self) -> AnswerReader:
        """Return a reader of the same answer in its initial state."""
        return replace(self, thinking=self.thinking and self.thinking.fresh(), calls=self.calls and self.calls.fresh())

    @property
    def is_thinking(self) -> bool:
        if self.calls and self.calls.is_thought:
            return not self.shows_thinking
        return any(reader.is_inside for reader in (self.thinking, self._behind_call) if reader)

    @property
    def is_unopened(self) -> bool:
        """True once a closing tag without an opening one has shown that all text before it is thinking."""
        return self.thinking is not None and self.thinking.is_unopened

    def add(self, text: str) -> AnswerText:
        was_unopened = self.is_unopened
        thought, text = self.thinking.add(text) if self.thinking else ("", text)
        parsed = self._parsed(thought, self.calls.add(text) if self.calls else [text])
        if self.is_unopened == was_unopened:
            return parsed
        if self.calls:  # without a call so far
            parsed.text += "".join(piece for piece in self.calls.finish() if isinstance(piece, str))
            self.calls = self.calls.fresh()
        behind = self.add("")
        for call in behind.calls:
            call.at += len(parsed.text)
        return AnswerText(parsed.text + behind.text, behind.thinking, behind.calls, num_thought=len(parsed.text))

    def finish(self, *, is_cut: bool = False) -> AnswerText:
        """Return the remaining parts at the end of the text. is_cut: the token limit ended the text, so an open call
        stays a call with its arguments so far."""
        thought, text, in_thinking = self.thinking.finish() if self.thinking else ("", "", "")
        if in_thinking:
            assert self.calls
            return self._calls_in_thinking([*self.calls.add(in_thinking), *self.calls.finish()])
        pieces: list[Piece] = [*self.calls.add(text), *self.calls.finish()] if self.calls else [text]
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
                case Thought(text) if not self.shows_thinking:
                    parsed.thinking += text
                case Thought(text):
                    parsed.text += text
                case str() if self.is_forced:
                    pass
                case str() if self._behind_call:
                    thought, text = self._behind_call.add(piece)
                    parsed.thinking += thought
                    parsed.text += text
                case str():
                    parsed.text += piece
                case CallBegun(number, name):
                    self._end_text(parsed)
                    # Nine alphanumerics are the only form of a call id that Mistral's templates accept.
                    id = secrets.token_hex(5)[:9]
                    if self.first_index is not None:
                        id = named_id(name, self.first_index + number)
                    parsed.calls.append(CallText(number, id=id, name=name, at=len(parsed.text)))
                case CallArguments(number, text):
                    _part_of(parsed, number).arguments += text
                case CallBroken(number, raw, rest) if not self.is_forced:
                    parsed.calls.append(CallText(number, broken=raw, rest=rest, at=len(parsed.text)))
                case CallBroken():
                    self.num_calls = 0  # a stop string cut a forced call: finish_reason is stop, not tool_calls
                case CallEnded():
                    self._behind_call = self.thinking.behind_call() if self.thinking else None
                    self.num_calls += 1
                    self.is_over = not self.is_parallel
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
    texts = kind.begins if kind and chat.forced is None else ()
    return [text.replace("NAME", name) for text in texts for name in (chat.parameters if "NAME" in text else [""])]


def _part_of(parsed: AnswerText, number: int) -> CallText:
    if not parsed.calls or parsed.calls[-1].number != number:
        parsed.calls.append(CallText(number, at=len(parsed.text)))
    return parsed.calls[-1]
