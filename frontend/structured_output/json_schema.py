"""Parts of grammars: JSON schemas, without unenforceable parts or in another place of a document; and special tokens.

All functions of schemas raise RecursionError for one nested some 300 levels deep.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from core.types.errors import RequestError
from core.types.json_schema import DROPPED, LITERAL, NAMED, WRITTEN, rewritten, target
from core.types.request import in_quotes

_TYPES = frozenset(("null", "boolean", "number", "integer", "string", "array", "object"))
# Look-around, word boundaries and back-references, which no automaton can follow; also matches escaped ones.
LOOKING_AROUND = re.compile(r"\(\?<?[=!]|\\[bB1-9]|\\k<")
_PART = re.compile(r"\(\?<?[=!]|\\k<|\[\^?\]?(?:[^\]\\]|\\.)*\]|\\.|.", re.DOTALL)  # of a regular expression
_REPEATED = re.compile(r"(?:[*+?]|\{\d+,?\d*\})[?+]?")
_OF_DOCUMENT = frozenset(("$id", "$schema"))  # keywords of a schema document


def in_lark(schema: Mapping[str, Any], *, is_lenient: bool) -> str:
    """Return the schema as an expression of llguidance's Lark, in json.dumps's whitespace."""
    return f"%json {json.dumps({**schema, 'x-guidance': {**WRITTEN, 'lenient': is_lenient}})}"


def lenient(schema: Any) -> Any:
    """Return the schema without the parts that no grammar can enforce; for schemas that need not be strict."""

    def rule(key: str, value: Any) -> Any:
        if key == "pattern" and isinstance(value, str):
            return DROPPED if (weaker := without_look_around(value)) is None else weaker
        return value if _can_be_enforced(key, value, schema) else DROPPED

    return rewritten(schema, rule)


def weakened(schema: Any, param: str) -> tuple[Any, list[str]]:
    """Return the schema with patterns that have no look-around, which accept more, and the paths of those patterns.

    pydantic writes such a pattern for a Decimal. Raises RequestError for back-references, with path and keyword.
    """
    paths = list[str]()

    def weaker(value: Any, path: str, *, is_named: bool = False) -> Any:
        if isinstance(value, list):
            return [weaker(one, f"{path}[{number}]") for number, one in enumerate(value)]
        if not isinstance(value, Mapping):
            return value
        found = dict(value)
        for key, one in value.items():
            if key == "pattern" and isinstance(one, str) and not is_named:
                found[key] = pattern(one, f"{path}.{key}")
            elif key not in LITERAL or is_named:
                found[key] = weaker(one, f"{path}.{key}", is_named=key in NAMED and not is_named)
        return found

    def pattern(value: str, path: str) -> str:
        if (found := without_look_around(value)) is None:
            text = f"{path}: back-references are not supported; write the pattern without them"
            raise RequestError(text, param=param)
        if found != value:
            paths.append(path)
        return found

    return weaker(schema, param), paths


def without_look_around(pattern: str) -> str | None:
    """Return the pattern without look-around and word boundaries, so that it accepts more; None if it has
    back-references."""
    kept, at, depth = list[str](), 0, 0  # depth: of groups inside a look-around
    while found := _PART.match(pattern, at):
        part, at = found[0], found.end()
        if part == r"\k<" or (part[0] == "\\" and part[1:].isdecimal() and part != r"\0"):
            return None
        is_around = part in ("(?=", "(?!", "(?<=", "(?<!")
        if depth or is_around:
            depth += {"(": 1, ")": -1}.get(part[0], 0)
        elif part not in (r"\b", r"\B"):
            kept.append(part)
            continue
        if not depth and (repeated := _REPEATED.match(pattern, at)):
            at = repeated.end()
    return "".join(kept)


def _can_be_enforced(key: str, value: Any, document: Any) -> bool:
    match key, value:
        case "$ref", str():
            try:
                target(document, value)
            except LookupError:
                return False
        case "type", str():
            return value in _TYPES
        case "type", list():
            return all(isinstance(one, str) and one in _TYPES for one in value)
    return True


def moved(schema: Any, place: str) -> Any:
    """Return the schema for another place of a document, with its internal references adjusted."""

    def relocate(key: str, value: Any) -> Any:
        is_inside = key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))
        return place + value[1:] if is_inside else value

    return rewritten({key: value for key, value in schema.items() if key not in _OF_DOCUMENT}, relocate)


class SpecialTokens:
    """Special tokens of one model, which text in a grammar never matches. Generated expressions accept either the token
    or its spelled-out text, as the parsers do."""

    def __init__(self, ids: Mapping[str, int] | None = None) -> None:
        """ids: token ids by text."""
        self._ids = ids or {}

    def literal(self, text: str) -> str:
        """Return a Lark expression for exactly this text; empty for an empty text."""
        pieces = self._pattern.split(text) if self._ids else [text]
        spelt = ((piece, in_quotes(piece)) for piece in pieces if piece)
        return " ".join(f"({text} | <[{self._ids[piece]}]>)" if piece in self._ids else text for piece, text in spelt)

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
