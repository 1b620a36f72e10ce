"""Transformations of JSON schemas: removal of unenforceable parts, and relocation within a document.

All functions raise RecursionError for a schema nested some 300 levels deep.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from core.types.errors import RequestError
from core.types.json_schema import DROPPED, LITERAL, NAMED, WRITTEN, rewritten, target

_TYPES = frozenset(("null", "boolean", "number", "integer", "string", "array", "object"))
# Look-around, word boundaries and back-references, which no automaton can follow; also matches escaped ones.
LOOKING_AROUND = re.compile(r"\(\?<?[=!]|\\[bB1-9]|\\k<")
_PART = re.compile(r"\(\?<?[=!]|\\k<|\[\^?\]?(?:[^\]\\]|\\.)*\]|\\.|.", re.DOTALL)  # of a regular expression
_REPEATED = re.compile(r"(?:[*+?]|\{\d+,?\d*\})[?+]?")
# Other formats are annotations, as in the specification. pydantic writes `path`, `password` and `binary`.
_FORMATS = frozenset(
    ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)
MAY_BE_WEAKENED = re.compile(rf'{LOOKING_AROUND.pattern}|"format"')  # in the text of a schema
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
    """Return a schema that accepts more, with the paths of what changed: patterns lose their look-around, which
    pydantic writes for a Decimal, and formats that are not enforced are left out.

    Raises RequestError for back-references, with path and keyword.
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
            elif key == "format" and isinstance(one, str) and one not in _FORMATS and not is_named:
                del found[key]
                paths.append(f"{path}.{key}")
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
            return _resolves(value, document)
        case "type", str():
            return value in _TYPES
        case "type", list():
            return all(isinstance(one, str) and one in _TYPES for one in value)
    return True


def _resolves(reference: str, document: Any) -> bool:
    try:
        target(document, reference)
    except LookupError:
        return False
    return True


def moved(schema: Any, place: str) -> Any:
    """Return the schema for another place of a document, with its internal references adjusted."""

    def relocate(key: str, value: Any) -> Any:
        is_inside = key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))
        return place + value[1:] if is_inside else value

    return rewritten({key: value for key, value in schema.items() if key not in _OF_DOCUMENT}, relocate)
