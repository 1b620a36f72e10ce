"""Calls out of an answer's text, piece by piece."""

from __future__ import annotations

from contextlib import suppress

from frontend.parsers.formats import Format
from frontend.parsers.pieces import Piece
from frontend.parsers.scanner import Scanner, Tools


class CallReader:
    """Reads one answer. However its text is cut, what comes out, joined, is the same, and no text is lost."""

    def __init__(self, format: Format, tools: Tools) -> None:
        """tools: a call of any other is text."""
        self._scan = Scanner(tools)
        self._reading = format(self._scan)
        self._read()

    def add(self, text: str) -> list[Piece]:
        self._scan.feed(text)
        return self._read()

    def finish(self) -> list[Piece]:
        """What is left when no more comes."""
        self._scan.end()
        return self._read()

    def _read(self) -> list[Piece]:
        with suppress(StopIteration):
            next(self._reading)
        said, self._scan.said = self._scan.said, []
        return said
