"""Transformations of JSON schemas: removal of unenforceable parts, and relocation within a document.

All functions raise RecursionError for a schema nested some 300 levels deep.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from core.types.json_schema import DROPPED, WRITTEN, rewritten, target

_TYPES = frozenset(("null", "boolean", "number", "integer", "string", "array", "object"))
# Lookaround, word boundaries and backreferences; also matches escaped ones.
_LOOKING_AROUND = re.compile(r"\(\?<?[=!]|\\[bB1-9]|\\k<")
_OF_DOCUMENT = frozenset(("$id", "$schema"))  # keywords of a schema document


def in_lark(schema: Mapping[str, Any], *, is_lenient: bool) -> str:
    """Return the schema as an expression of llguidance's Lark, in json.dumps's whitespace."""
    return f"%json {json.dumps({**schema, 'x-guidance': {**WRITTEN, 'lenient': is_lenient}})}"


def lenient(schema: Any) -> Any:
    """Return the schema without the parts that no grammar can enforce; for schemas that need not be strict."""
    return rewritten(schema, lambda key, value: value if _can_be_enforced(key, value, schema) else DROPPED)


def _can_be_enforced(key: str, value: Any, document: Any) -> bool:
    match key, value:
        case "pattern", str():
            return not _LOOKING_AROUND.search(value)
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
