"""A JSON schema rewritten, keyword by keyword: what only looks like one, by its name or in a value, stays as it is.

All of it raises RecursionError for a schema that is nested some 300 deep.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

DROPPED = object()
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TYPES = frozenset(("null", "boolean", "number", "integer", "string", "array", "object"))
_LOOKING_AROUND = re.compile(r"\(\?<?[=!]|\\[bB1-9]|\\k<")  # and words' bounds, and back; also where it is escaped
_MAX_DIGITS = 9  # of a number in a reference
_OF_DOCUMENT = frozenset(("$id", "$schema"))  # what a schema says as a document of its own
_LITERAL = frozenset(("const", "enum", "default", "examples"))  # keywords whose values are no schemas
_NAMED = frozenset(
    ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
)  # of schemas by name


def rewritten(schema: Any, rule: Callable[[str, Any], Any]) -> Any:
    """rule: what a keyword's value is to be, before what is inside of that is looked at; or DROPPED."""
    if isinstance(schema, list):
        return [rewritten(one, rule) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {key: rule(key, value) for key, value in schema.items()}
    return {key: _inside(key, value, rule) for key, value in made.items() if value is not DROPPED}


def in_lark(schema: Mapping[str, Any], *, is_lenient: bool) -> str:
    """As a rule of llguidance's Lark has it, written as json.dumps writes."""
    return f"%json {json.dumps({**schema, 'x-guidance': {**_WRITTEN, 'lenient': is_lenient}})}"


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
    if reference != "#" and not reference.startswith("#/"):
        return False
    found = document
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and len(name) < _MAX_DIGITS and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            return False
    return True


def moved(schema: Any, place: str) -> Any:
    """The same at another place of a document: what points into it points there."""

    def led(key: str, value: Any) -> Any:
        is_inside = key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))
        return place + value[1:] if is_inside else value

    return rewritten({key: value for key, value in schema.items() if key not in _OF_DOCUMENT}, led)


def _inside(key: str, value: Any, rule: Callable[[str, Any], Any]) -> Any:
    if key in _LITERAL:
        return value
    if key in _NAMED and isinstance(value, Mapping):
        return {name: rewritten(one, rule) for name, one in value.items()}
    return rewritten(value, rule)
