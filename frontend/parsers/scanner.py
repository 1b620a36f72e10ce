"""The text of one answer as it comes, for whoever reads calls out of it.

A format is a generator: it yields where it cannot go on without more text. What it takes is kept until it is known to
be markup, so that what turns out to be no call goes back, and is text.

    text  <tool_call>  {"name": "f", "arguments":   {"a": 1}  }  </tool_call>
    ↑     ↑ taken, may go back                      ↑ begun: arguments go out as they come
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, TypeAlias, TypeVar

from frontend.parsers.pieces import CallArguments, CallBegun, CallBroken, CallEnded, Piece

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]  # of something, in pieces
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]  # by name, the JSON schema of its arguments

_MAX_HELD = 8192  # characters that may be the beginning of a call; longer ones are text


class Scanner:
    """Belongs to one answer."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.said: list[Piece] = []
        self._text = ""  # not looked at yet
        self._taken: list[str] = []  # since the last text or call
        self._num_taken = 0  # characters of these
        self._unsaid: list[str] = []  # of a call that has begun: what was taken since its last piece
        self.is_ended = False  # no more text comes
        self.is_begun = False  # a call
        self._number = -1  # of the last call
        self._is_after_call = False  # nothing but space since then

    def feed(self, text: str) -> None:
        self._text += text

    def end(self) -> None:
        self.is_ended = True

    @property
    def rest(self) -> str:
        """What is there, and not taken."""
        return self._text

    # Text

    def text_until(self, *markers: str) -> Reading[str]:
        """Say what comes before the first of the markers, and take that; "" where there is none any more.

        Space before a marker goes with it, and space between calls is nobody's.
        """
        self._forget_taken()
        while True:
            at, marker = min(((i, m) for m in markers if (i := self._text.find(m)) >= 0), default=(-1, ""))
            if marker:
                num = len(self._text[:at].rstrip())
                self._say_next(num)
                self.take(at - num + len(marker))
                return marker
            if self.is_ended:
                self._say_rest()
                return ""
            held = max(overlap(self._text, marker) for marker in markers)
            self._say_next(len(self._text[: len(self._text) - held].rstrip()))
            yield

    def all_text(self) -> Reading[None]:
        """Say all that is left."""
        self._forget_taken()
        while not self.is_ended:
            self._say_next(len(self._text.rstrip()))
            yield
        self._say_rest()

    def take(self, num: int) -> str:
        """So many characters, which are there."""
        text, self._text = self._text[:num], self._text[num:]
        self._taken.append(text)
        self._num_taken += num
        self._unsaid.append(text)
        return text

    def optional(self, literal: str) -> Reading[bool]:
        """Take it, and space before it, where it comes next."""
        while True:
            begun = self._text.lstrip()
            if begun.startswith(literal):
                self.take(len(self._text) - len(begun) + len(literal))
                return True
            if self.is_ended or not literal.startswith(begun):
                return False
            yield

    def next_is(self, literal: str) -> Reading[bool]:
        """True if that comes next, after space; nothing is taken."""
        while not self.is_ended and literal.startswith(self._text.lstrip()) and literal != self._text.lstrip():
            yield
        return self._text.lstrip().startswith(literal)

    def before(self, *ends: str, most: int | None = None) -> Reading[str]:
        """Take what comes before the first of `ends`, and give it; "" where none of them comes, or not soon."""
        begin = 0
        while True:
            at = min((i for end in ends if (i := self._text.find(end, begin)) >= 0), default=-1)
            if at >= 0:
                return self.take(at) if most is None or at <= most else ""
            begin = max(0, len(self._text) - max(map(len, ends)) + 1)
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
        self.said.append(CallBegun(self._number, name))
        self._unsaid.clear()

    def say_arguments(self, text: str) -> None:
        """In place of what was taken since the last of them."""
        assert self.is_begun
        if text:
            self.said.append(CallArguments(self._number, text))
        self._unsaid.clear()

    def end_call(self) -> None:
        assert self.is_begun
        self.said.append(CallEnded(self._number))
        self.is_begun = False
        self._is_after_call = True
        self._forget_taken()
        self._unsaid.clear()

    def give_up(self, *, is_text: bool = False) -> None:
        """It is no call. What was taken first is text, and what came after it is looked at again, unless is_text: then
        all of it is text. Neither of a call that has begun."""
        taken, unsaid = self._taken, "".join(self._unsaid)
        self._taken, self._unsaid, self._num_taken = [], [], 0
        if self.is_begun:
            self.is_begun = False
            self._is_after_call = False
            self.said.append(CallBroken(self._number, "".join(taken), unsaid))
            return
        num_text = len(taken) if is_text else 1
        self._text = "".join(taken[num_text:]) + self._text
        self._say("".join(taken[:num_text]))

    def _forget_taken(self) -> None:
        self._taken.clear()
        self._num_taken = 0

    def _say_rest(self) -> None:
        if self._is_after_call and self._text.isspace():
            self._text = ""
        self._say_next(len(self._text))

    def _say_next(self, num: int) -> None:
        """So many characters are text."""
        text, self._text = self._text[:num], self._text[num:]
        self._say(text)

    def _say(self, text: str) -> None:
        if text:
            self._is_after_call = False
            self.said.append(text)


def overlap(text: str, marker: str) -> int:
    """The longest end of `text` that is a beginning of `marker`."""
    return max((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), default=0)
