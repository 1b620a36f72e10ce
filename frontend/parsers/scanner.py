"""Incremental parser of tool calls in one answer's text.

A format is a generator that yields when it needs more text. Consumed text is kept until it is known to be markup, so
that it can be returned as text if there is no call.

    text  <tool_call>  {"name": "f", "arguments":   {"a": 1}  }  </tool_call>
    ↑     ↑ taken, may go back                      ↑ begun: arguments are emitted as they arrive
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar


@dataclass(frozen=True, slots=True)
class Thought:
    """Fragment of thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Beginning of a call of one of the request's tools; its arguments follow."""

    number: int  # within its answer, from 0
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Fragment of a call's arguments."""

    number: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """End of a call, whose concatenated arguments are a JSON object."""

    number: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """Text that began like a call but is not one, or was cut off."""

    number: int
    raw: str  # all of its text, as the model wrote it
    rest: str  # suffix of `raw` that has not been emitted


CallPiece: TypeAlias = CallBegun | CallArguments | CallEnded | CallBroken
Piece: TypeAlias = str | Thought | CallPiece


T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]  # parser that yields for more text and returns T
Format: TypeAlias = Callable[["Scanner"], Reading[None]]
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]  # JSON schema of the arguments, by name

MAX_NAME = 128  # characters of a tool's or a parameter's name
_MAX_FED = 4096  # characters; the scanner copies what it has not consumed
_MAX_HELD = 8192  # characters that may be the beginning of a call; longer ones are text


class CallReader:
    """Parser of one answer. The concatenated pieces do not depend on how the text was split, and no text is lost."""

    def __init__(self, format: Format, tools: Tools) -> None:
        """tools: calls of other names are treated as text."""
        self._format = format
        self._tools = tools
        self._scan = Scanner(tools)
        self._reading = format(self._scan)
        self._read()

    def fresh(self) -> CallReader:
        return CallReader(self._format, self._tools)

    @property
    def is_thought(self) -> bool:
        """True while the text is thinking that the format itself marks."""
        return self._scan.is_thought

    def add(self, text: str) -> list[Piece]:
        pieces = list[Piece]()
        for at in range(0, len(text), _MAX_FED):
            self._scan.rest += text[at : at + _MAX_FED]
            pieces += self._read()
        return pieces

    def finish(self) -> list[Piece]:
        """Return the remaining pieces at the end of the text."""
        self._scan.is_ended = True
        return self._read()

    def _read(self) -> list[Piece]:
        next(self._reading, None)
        pieces, self._scan.pieces = self._scan.pieces, []
        return pieces


class Scanner:
    """Scanner of one answer's text, for the parser of a format."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.pieces: list[Piece] = []
        self.rest = ""  # text that has arrived and is not consumed
        self._taken: list[str] = []  # consumed since the last text or call
        self._num_taken = 0  # characters in `_taken`
        self._unemitted: list[str] = []  # consumed since the last piece of an open call
        self.is_ended = False  # the text is complete
        self.is_begun = False  # a call is open
        self._number = -1  # of the last call
        self._is_after_call = False  # only space has followed the last call
        self.is_thought = False  # the emitted text is thinking

    # Text

    def text_until(self, *markers: str) -> Reading[str]:
        """Emit the text before the first marker. Consume and return the marker, or return "" at the end of the text.

        Space before a marker is consumed with it, and space between calls is dropped.
        """
        self.forget_taken()
        while True:
            at, marker = min(((i, m) for m in markers if (i := self.rest.find(m)) >= 0), default=(-1, ""))
            if marker:
                num = len(self.rest[:at].rstrip())
                self._emit_next(num)
                self.take(at - num + len(marker))
                return marker
            if self.is_ended:
                self._emit_rest()
                return ""
            held = max(overlap(self.rest, marker) for marker in markers)
            self._emit_next(len(self.rest[: len(self.rest) - held].rstrip()))
            yield

    def next_call(self, call: str, *blocks: str) -> Reading[bool]:
        """Emit the text before the next `call`, alone or at the beginning of a block, and consume both. Return whether
        there is one."""
        while marker := (yield from self.text_until(*blocks, call)):
            if marker == call or (yield from self.optional(call)):
                return True
            self.give_up()
        return False

    def all_text(self) -> Reading[None]:
        """Emit all remaining text."""
        self.forget_taken()
        while not self.is_ended:
            self._emit_next(len(self.rest.rstrip()))
            yield
        self._emit_rest()

    def take(self, num: int) -> str:
        """Consume `num` characters, which must have arrived."""
        text, self.rest = self.rest[:num], self.rest[num:]
        self._taken.append(text)
        self._num_taken += num
        self._unemitted.append(text)
        return text

    def optional(self, literal: str) -> Reading[bool]:
        """Consume the literal, and space before it, if it comes next."""
        while True:
            begun = self.rest.lstrip()
            if begun.startswith(literal):
                self.take(len(self.rest) - len(begun) + len(literal))
                return True
            if self.is_ended or not literal.startswith(begun):
                return False
            yield

    def next_is(self, literal: str) -> Reading[bool]:
        """Return whether the literal comes next, after space; consumes nothing."""
        while not self.is_ended and literal.startswith(self.rest.lstrip()) and literal != self.rest.lstrip():
            yield
        return self.rest.lstrip().startswith(literal)

    def before(self, *ends: str, most: int | None = None) -> Reading[str]:
        """Consume and return the text before the first of `ends`; "" if none occurs within `most` characters."""
        begin = 0
        while True:
            at = min((i for end in ends if (i := self.rest.find(end, begin)) >= 0), default=-1)
            if at >= 0:
                return self.take(at) if most is None or at <= most else ""
            begin = max(0, len(self.rest) - max(map(len, ends)) + 1)
            if self.is_ended or (most is not None and begin > most):
                return ""
            yield

    # Calls

    @property
    def is_held_for_too_long(self) -> bool:
        return not self.is_begun and self._num_taken > _MAX_HELD

    def begin(self, name: str) -> None:
        assert not self.is_begun and name in self.tools
        self._number += 1
        self.is_begun = True
        self.pieces.append(CallBegun(self._number, name))
        self._unemitted.clear()

    def emit_arguments(self, text: str) -> None:
        """Emit arguments in place of the text consumed since the last emitted piece."""
        assert self.is_begun
        if text:
            self.pieces.append(CallArguments(self._number, text))
        self._unemitted.clear()

    def end_call(self) -> None:
        assert self.is_begun
        self.pieces.append(CallEnded(self._number))
        self.is_begun = False
        self._is_after_call = True
        self.forget_taken()
        self._unemitted.clear()

    def give_up(self, *, is_text: bool = False) -> None:
        """Reject the consumed text as a call. If a call is open, report it as broken. Otherwise emit the first consumed
        piece as text and scan the rest again (is_text: emit all of it)."""
        taken, unemitted = self._taken, "".join(self._unemitted)
        self._taken, self._unemitted, self._num_taken = [], [], 0
        if self.is_begun:
            self.is_begun = False
            self._is_after_call = False
            self.pieces.append(CallBroken(self._number, "".join(taken), unemitted))
            return
        num_text = len(taken) if is_text else 1
        self.rest = "".join(taken[num_text:]) + self.rest
        self.emit("".join(taken[:num_text]))

    def forget_taken(self) -> None:
        """Count the consumed text as markup, which is never returned as text."""
        self._taken.clear()
        self._num_taken = 0

    def _emit_rest(self) -> None:
        if self._is_after_call and self.rest.isspace():
            self.rest = ""
        self._emit_next(len(self.rest))

    def _emit_next(self, num: int) -> None:
        """Emit the next `num` characters as text."""
        text, self.rest = self.rest[:num], self.rest[num:]
        self.emit(text)

    def emit(self, text: str) -> None:
        """Emit text that is not in the answer, or that has been consumed."""
        if text:
            self._is_after_call = False
            self.pieces.append(Thought(text) if self.is_thought else text)


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `marker`."""
    return max((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), default=0)
