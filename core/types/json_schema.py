"""A JSON schema rewritten, and what it refers to: what only looks like one, by its name or in a value, stays as it is.

All of it raises RecursionError for a schema that is nested some 300 deep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

# How instances are written, in llguidance's words: as json.dumps does. Whoever may add blanks may go on for ever.
WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
DROPPED = object()
_MAX_DIGITS = 9  # of a number in a reference
LITERAL = frozenset(("const", "enum", "default", "examples"))  # keywords whose values are no schemas
_NAMED = frozenset(
    ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
)  # of schemas by name


def rewritten(schema: Any, rule: Callable[[str, Any], Any]) -> Any:
    """rule: what a keyword's value is to be, before what is inside of that is looked at; or DROPPED."""

    def change(keywords: Mapping[str, Any]) -> dict[str, Any]:
        made = {key: rule(key, value) for key, value in keywords.items()}
        return {key: value for key, value in made.items() if value is not DROPPED}

    return changed(schema, change)


def changed(schema: Any, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Any:
    """change: what a schema's keywords are to be, before what is inside of them is looked at."""
    if isinstance(schema, list):
        return [changed(one, change) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _inside(key, value, change) for key, value in change(schema).items()}


def target(document: Any, reference: str) -> Any:
    """What `#`, or `#/…`, leads to. Raises LookupError where that is nothing, or it is another kind of reference."""
    if reference != "#" and not reference.startswith("#/"):
        raise LookupError(reference)
    found = document
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and len(name) < _MAX_DIGITS:
            found = found[int(name)]
        elif isinstance(found, Mapping):
            found = found[name]
        else:
            raise LookupError(reference)
    return found


def _inside(key: str, value: Any, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Any:
    if key in LITERAL:
        return value
    if key in _NAMED and isinstance(value, Mapping):
        return {name: changed(one, change) for name, one in value.items()}
    return changed(value, change)
