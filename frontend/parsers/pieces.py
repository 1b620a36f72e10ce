"""Parsed pieces of an answer: text, thinking and tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


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
    """Text that began like a call but is none, or was cut off."""

    number: int
    raw: str  # all of its text, as the model wrote it
    rest: str  # suffix of `raw` that has not been emitted


CallPiece: TypeAlias = CallBegun | CallArguments | CallEnded | CallBroken
Piece: TypeAlias = str | Thought | CallPiece
