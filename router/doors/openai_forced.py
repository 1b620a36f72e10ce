"""Answers that are bound to be calls (`tool_choice`): the schema that they keep to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.words.errors import RequestError
from cluster.words.grammar import Grammar, GrammarKind
from router.doors.openai_messages import ToolGiven

_DEFINITIONS = ("$defs", "definitions")


def forced_grammar(name: str, tools: Sequence[ToolGiven], *, is_parallel: bool) -> Grammar:
    """The arguments of the tool of that name; or, where it is "", a list of calls of any. Raises RequestError."""
    if name:
        chosen = next((tool for tool in tools if tool.function.name == name), None)
        if chosen is None:
            raise RequestError(f"tool_choice: no tool is named {name!r}", param="tool_choice")
        schema = _object(chosen.function.parameters)
        is_strict = bool(chosen.function.strict)
    else:
        definitions: dict[str, Any] = {}
        calls = [_call(tool, f"tool{number}", definitions) for number, tool in enumerate(tools)]
        schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "$defs": definitions}
        if not is_parallel:
            schema["maxItems"] = 1
        is_strict = all(tool.function.strict for tool in tools)
    kind = GrammarKind.JSON_SCHEMA if is_strict else GrammarKind.LENIENT_JSON_SCHEMA
    return Grammar(kind=kind, text=json.dumps(schema))


def _call(tool: ToolGiven, prefix: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """{"name": …, "arguments": …}; what its schema defines goes into `definitions`, under names of its own."""
    arguments = _moved(_object(tool.function.parameters), prefix)
    for place in _DEFINITIONS:
        defined = arguments.pop(place, None)
        for name, definition in defined.items() if isinstance(defined, Mapping) else ():
            definitions[f"{prefix}.{name}"] = definition
    properties = {"name": {"const": tool.function.name}, "arguments": arguments}
    required = ["name", "arguments"]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _moved(schema: Any, prefix: str) -> Any:
    """The same, with references to where its definitions will be."""
    if isinstance(schema, list):
        return [_moved(one, prefix) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value, prefix) for key, value in schema.items()}
    reference = moved.get("$ref")
    for place in _DEFINITIONS:
        if isinstance(reference, str) and reference.startswith(f"#/{place}/"):
            moved["$ref"] = f"#/$defs/{prefix}.{reference.removeprefix(f'#/{place}/')}"
    return moved


def _object(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"type": "object", **(parameters or {})}
