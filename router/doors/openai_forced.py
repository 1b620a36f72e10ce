"""Answers that are bound to be calls (`tool_choice`): the schema that they keep to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.words.errors import RequestError
from cluster.words.grammar import Grammar, GrammarKind
from router.doors.openai_messages import ToolGiven

_LITERAL = frozenset(("const", "enum", "default", "examples"))  # keywords whose values are no schemas
_NAMED = frozenset(
    ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
)  # of schemas by name
_OF_DOCUMENT = frozenset(("$id", "$schema"))  # what a schema says as a document of its own


def forced_grammar(name: str, tools: Sequence[ToolGiven], *, is_parallel: bool) -> Grammar:
    """The arguments of the tool of that name; or, where it is "", a list of calls of any. Raises RequestError."""
    if name:
        chosen = next((tool for tool in tools if tool.function.name == name), None)
        if chosen is None:
            raise RequestError(f"tool_choice: no tool is named {name!r}", param="tool_choice")
        schema = _object(chosen.function.parameters)
        is_strict = bool(chosen.function.strict)
    else:
        calls = [_call(tool, f"#/$defs/tool{number}") for number, tool in enumerate(tools)]
        definitions = {f"tool{number}": _arguments(tool, f"#/$defs/tool{number}") for number, tool in enumerate(tools)}
        schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "$defs": definitions}
        if not is_parallel:
            schema["maxItems"] = 1
        is_strict = all(tool.function.strict for tool in tools)
    kind = GrammarKind.JSON_SCHEMA if is_strict else GrammarKind.LENIENT_JSON_SCHEMA
    return Grammar(kind=kind, text=json.dumps(schema))


def _call(tool: ToolGiven, place: str) -> dict[str, Any]:
    """{"name": …, "arguments": …}; place: where the schema of its arguments stands."""
    properties = {"name": {"const": tool.function.name}, "arguments": {"$ref": place}}
    required = ["name", "arguments"]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _arguments(tool: ToolGiven, place: str) -> dict[str, Any]:
    """The schema of its arguments, to stand there."""
    schema = _object(tool.function.parameters)
    return {key: _moved_value(key, value, place) for key, value in schema.items() if key not in _OF_DOCUMENT}


def _moved(schema: Any, place: str) -> Any:
    """The same, in which what points into it points to where it will be."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _moved_value(key, value, place) for key, value in schema.items()}


def _moved_value(key: str, value: Any, place: str) -> Any:
    if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
        return place + value[1:]
    if key in _LITERAL:
        return value
    if key in _NAMED and isinstance(value, Mapping):
        return {name: _moved(one, place) for name, one in value.items()}
    return _moved(value, place)


def _object(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"type": "object", **(parameters or {})}
