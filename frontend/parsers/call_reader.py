"""Incremental parser of tool calls in an answer's text."""

from __future__ import annotations

from contextlib import suppress

from frontend.parsers.formats import Format
from frontend.parsers.scanner import Piece, Scanner, Tools

_MAX_FED = 4096  # characters; the scanner copies what it has not consumed


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
        """Return a fresh reader in the initial state."""
        return CallReader(self._format, self._tools)

    @property
    def is_thought(self) -> bool:
        """True while the text is thinking that the format itself marks."""
        return self._scan.is_thought

    def add(self, text: str) -> list[Piece]:
        pieces = list[Piece]()
        for at in range(0, len(text), _MAX_FED):
            self._scan.feed(text[at : at + _MAX_FED])
            pieces += self._read()
        return pieces

    def finish(self) -> list[Piece]:
        """Return the remaining pieces at the end of the text."""
        self._scan.end()
        return self._read()

    def _read(self) -> list[Piece]:
        with suppress(StopIteration):
            next(self._reading)
        pieces, self._scan.pieces = self._scan.pieces, []
        return pieces
