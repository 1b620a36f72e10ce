"""Special tokens in grammars: text in a grammar never matches a special token; it has to be named."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property

from core.types.request import in_quotes


class SpecialTokens:
    """Special tokens of one model. Generated expressions accept either the token or its spelled-out text, as the
    parsers do."""

    def __init__(self, ids: Mapping[str, int] | None = None) -> None:
        """ids: token ids by text."""
        self._ids = ids or {}

    def literal(self, text: str) -> str:
        """Return a Lark expression for exactly this text; empty for an empty text."""
        pieces = self._pattern.split(text) if self._ids else [text]
        return " ".join(self._piece(piece) for piece in pieces if piece)

    def one_of(self, texts: Iterable[str]) -> str:
        expressions = [self.literal(text) for text in texts]
        return f"({' | '.join(expressions)})" if any(expressions) else ""

    def begun(self, text: str) -> tuple[str, str] | None:
        """Return the special token that the text begins with, by its name in Lark, and the rest; or None."""
        found = self._pattern.match(text) if self._ids else None
        return (f"<[{self._ids[found[0]]}]>", text[found.end() :]) if found else None

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._ids, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def _piece(self, text: str) -> str:
        spelt = in_quotes(text)
        return f"({spelt} | <[{self._ids[text]}]>)" if text in self._ids else spelt
