"""What an answer is made of, once it has been read: text, and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a tool that the request has; its arguments follow."""

    number: int  # in its answer, from 0
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON object of a call's arguments."""

    number: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call is whole: its arguments, joined, are a JSON object."""

    number: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """What had begun as a call is none after all, or was cut off."""

    number: int
    raw: str  # all of it, as the model wrote it
    rest: str  # what of `raw` was in no piece before, beyond a call's markup


CallPiece: TypeAlias = CallBegun | CallArguments | CallEnded | CallBroken
Piece: TypeAlias = str | CallPiece
