"""A JSON schema without what cannot be kept to, and at another place of a document.

All of it raises RecursionError for a schema that is nested some 300 deep.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from core.types.json_schema import DROPPED, WRITTEN, rewritten, target

_TYPES = frozenset(("null", "boolean", "number", "integer", "string", "array", "object"))
_LOOKING_AROUND = re.compile(r"\(\?<?[=!]|\\[bB1-9]|\\k<")  # and words' bounds, and back; also where it is escaped
_OF_DOCUMENT = frozenset(("$id", "$schema"))  # what a schema says as a document of its own


def in_lark(schema: Mapping[str, Any], *, is_lenient: bool) -> str:
    """As a rule of llguidance's Lark has it, written as json.dumps writes."""
    return f"%json {json.dumps({**schema, 'x-guidance': {**WRITTEN, 'lenient': is_lenient}})}"


def lenient(schema: Any) -> Any:
    """The same without what no grammar could be made of: it is passed over, where a schema need not be strict."""
    return rewritten(schema, lambda key, value: value if _can_be_enforced(key, value, schema) else DROPPED)


def _can_be_enforced(key: str, value: Any, document: Any) -> bool:
    match key, value:
        case "pattern", str():
            return not _LOOKING_AROUND.search(value)
        case "$ref", str():
            return _leads_somewhere(value, document)
        case "type", str():
            return value in _TYPES
        case "type", list():
            return all(isinstance(one, str) and one in _TYPES for one in value)
    return True


def _leads_somewhere(reference: str, document: Any) -> bool:
    try:
        target(document, reference)
    except LookupError:
        return False
    return True


def moved(schema: Any, place: str) -> Any:
    """The same at another place of a document: what points into it points there."""

    def led(key: str, value: Any) -> Any:
        is_inside = key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))
        return place + value[1:] if is_inside else value

    return rewritten({key: value for key, value in schema.items() if key not in _OF_DOCUMENT}, led)
