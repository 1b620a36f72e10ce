"""Rewriting of JSON schemas and resolution of their references. Literal values that look like schemas stay unchanged.

All functions raise RecursionError for a schema nested about 300 levels deep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

# llguidance's options to format instances as json.dumps does. If blanks were optional, a model could emit them without
# end.
WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
DROPPED = object()
_MAX_DIGITS = 9  # of an array index in a reference
LITERAL = frozenset(("const", "enum", "default", "examples"))  # keywords whose values are not schemas
NAMED = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))  # name -> schema


def rewritten(schema: Any, rule: Callable[[str, Any], Any]) -> Any:
    """Apply `rule(keyword, value)` to every keyword, outermost first. It returns the new value, or DROPPED."""

    def change(keywords: Mapping[str, Any]) -> dict[str, Any]:
        values = {key: rule(key, value) for key, value in keywords.items()}
        return {key: value for key, value in values.items() if value is not DROPPED}

    return changed(schema, change)


def changed(schema: Any, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Any:
    """Apply `change` to the keywords of every schema, outermost first."""
    if isinstance(schema, list):
        return [changed(one, change) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _inside(key, value, change) for key, value in change(schema).items()}


def target(document: Any, reference: str) -> Any:
    """Return the schema that `#` or `#/…` points to. Raises LookupError for a dangling or non-local reference."""
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
    if key in NAMED and isinstance(value, Mapping):
        return {name: changed(one, change) for name, one in value.items()}
    return changed(value, change)
