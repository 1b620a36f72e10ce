"""A model's special tokens in grammars: no text of a grammar matches one, but its name does."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property

from core.types.constraints import in_quotes


class SpecialTokens:
    """Those that a grammar of one model must name. Where one is wanted, its text may be spelt all the same: who reads
    answers takes either."""

    def __init__(self, ids: Mapping[str, int] | None = None) -> None:
        """ids: by their text."""
        self._ids = ids or {}

    def literal(self, text: str) -> str:
        """This text and no other, in Lark; nothing where it is empty."""
        pieces = self._pattern.split(text) if self._ids else [text]
        return " ".join(self._piece(piece) for piece in pieces if piece)

    def one_of(self, texts: Iterable[str]) -> str:
        said = [self.literal(text) for text in texts]
        return f"({' | '.join(said)})" if any(said) else ""

    def begun(self, text: str) -> tuple[str, str] | None:
        """The token with which it begins, by its name in Lark, and the rest of it."""
        found = self._pattern.match(text) if self._ids else None
        return (f"<[{self._ids[found[0]]}]>", text[found.end() :]) if found else None

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._ids, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def _piece(self, text: str) -> str:
        spelt = in_quotes(text)
        return f"({spelt} | <[{self._ids[text]}]>)" if text in self._ids else spelt
