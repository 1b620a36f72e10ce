"""Separation of thinking from the answer by a pair of tags, which the template or the model opens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from frontend.parsers.scanner import overlap


@dataclass(frozen=True)
class Tags:
    """Pair of tags around the thinking of a model family."""

    opening: str
    closing: str


THINK = Tags("<think>", "</think>")
TAGS = (
    THINK,  # DeepSeek, Qwen, GLM, MiniMax, Nemotron and most others
    Tags("[THINK]", "[/THINK]"),  # Magistral, Ministral
    Tags("<seed:think>", "</seed:think>"),  # Seed-OSS
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A, Command R7B
    Tags("<|channel>thought", "<channel|>"),  # Gemma 4
    Tags("◁think▷", "◁/think▷"),  # Kimi-VL
    Tags("<longcat_think>", "</longcat_think>"),  # LongCat
    Tags("<thinking>", "</thinking>"),
    Tags("<thought>", "</thought>"),
    Tags("<reasoning>", "</reasoning>"),
)

# Place where the prompt ends: inside thinking, before an answer that may begin with thinking, or after thinking.
Start = Literal["inside", "before", "after"]


class ThinkingReader:
    """Parser of the beginning of one answer. Space around thinking belongs to its tags.

    A call inside the thinking is quoted text if a closing tag follows. If none does, the model forgot it, and the call
    is real. So the reader holds the text from the first call on until the tag or the end of the answer.
    """

    def __init__(self, tags: Tags, start: Start, *, calls: Sequence[str] = (), first: tuple[str, ...] = ()) -> None:
        """calls: texts with which a tool call may begin. first: an answer that begins with one of them may be a call,
        and is then not read as thinking without an opening tag."""
        self._tags = tags
        self._start = start
        self._first = first
        self._marks = (tags.closing, *calls)
        self._may_begin_mark = re.compile("|".join({re.escape(mark[0]) for mark in self._marks})).search
        self._held = ""
        self._in_calls: list[str] = []  # text from the first call in the thinking on, before `_held`
        self._state = "opened" if start == "inside" else "before"
        self.is_unopened = False  # a closing tag without an opening one: all text before it is thinking

    def fresh(self) -> ThinkingReader:
        return ThinkingReader(self._tags, self._start, calls=self._marks[1:], first=self._first)

    def behind_call(self) -> ThinkingReader:
        """Return a reader for the text behind a call, which may begin with thinking again."""
        return ThinkingReader(self._tags, "after")

    @property
    def is_inside(self) -> bool:
        return self._state in ("opened", "inside", "in calls")

    def add(self, text: str) -> tuple[str, str]:
        """Consume text. Return (thinking, answer) that can be sent now. If `is_unopened` becomes true, the answer
        up to here was thinking; the text behind the tag comes with the next call."""
        self._held += text
        if self._state == "before":
            self._open()
        if self._state == "unopened":
            answer = self._look_for_closing()
            if self._state != "after":
                return "", answer
        thinking = self._think() if self.is_inside else ""
        if self._state == "closed":
            self._held = self._held.lstrip()
            self._state = "after" if self._held else "closed"
        if self._state == "after":
            text, self._held = self._held, ""
            return thinking, text
        return thinking, ""

    def finish(self) -> tuple[str, str, str]:
        """Return the remaining thinking, answer, and text from the first call in unclosed thinking on."""
        held, self._held = self._held, ""
        if self._state == "in calls":
            return "", "", "".join([*self._in_calls, held])
        if self.is_inside:
            return held.rstrip(), "", ""
        return "", held.lstrip() if self._state == "closed" else held, ""

    def _open(self) -> None:
        begun, opening = self._held.lstrip(), self._tags.opening
        if begun.startswith(opening):
            self._held, self._state = begun.removeprefix(opening), "opened"
        elif not opening.startswith(begun):
            may_be_call = begun.startswith(self._first)
            self._state = "unopened" if self._start == "before" and not may_be_call else "after"

    def _look_for_closing(self) -> str:
        """Return the text before the closing tag. A call ends the search: no thinking ends behind a call."""
        at, mark = _first(self._held, self._marks)
        if mark == self._tags.closing:
            text, self._held = self._held[:at], self._held[at + len(mark) :]
            self._state, self.is_unopened = "closed", True
            return text
        if mark:
            self._state = "after"
            return ""
        num = len(self._held) - self._overlap()
        text, self._held = self._held[:num], self._held[num:]
        return text

    def _think(self) -> str:
        if self._state == "opened":
            while (begun := self._held.lstrip()).startswith(self._tags.opening):
                self._held = begun.removeprefix(self._tags.opening)  # repeated by the model
            if self._tags.opening.startswith(begun):
                return ""
            self._held, self._state = begun, "inside"
        if self._state == "in calls":
            return self._think_in_calls()
        at, mark = _first(self._held, self._marks)
        if mark == self._tags.closing:
            thought, self._held, self._state = self._held[:at], self._held[at + len(mark) :], "closed"
            return thought.rstrip()
        if mark:
            thought = self._held[:at].rstrip()
            self._held, self._state = self._held[len(thought) :], "in calls"
            return thought + self._think_in_calls()
        thought = self._held[: len(self._held) - self._overlap()].rstrip()
        self._held = self._held[len(thought) :]
        return thought

    def _overlap(self) -> int:
        """Return how many of the last characters may belong to the closing tag or to a call."""
        if not self._may_begin_mark(self._held):
            return 0
        return max(overlap(self._held, mark) for mark in self._marks)

    def _think_in_calls(self) -> str:
        before, closing, behind = self._held.partition(self._tags.closing)
        if closing:
            self._in_calls.append(before)
            self._held, self._state = behind, "closed"
            return "".join(self._in_calls).rstrip()
        num = len(self._held) - overlap(self._held, self._tags.closing)
        self._in_calls.append(self._held[:num])
        self._held = self._held[num:]
        return ""


def _first(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Return the place of the first of `marks`, and the mark; "" if there is none."""
    return min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=(-1, ""))
