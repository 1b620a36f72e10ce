"""Grammars for `tool_choice`: constrain an answer to be tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from core.types.constraints import Grammar, GrammarKind
from core.types.errors import RequestError
from frontend.openai.messages import ToolGiven
from frontend.structured_output.json_schema import moved

_MAX_NAME = 128  # characters in an error message


def forced_grammar(name: str, tools: Sequence[ToolGiven], *, is_parallel: bool) -> Grammar:
    """Return the grammar of the named tool's arguments; for "", of a list of calls of any tool. Raises RequestError."""
    if not tools:
        raise RequestError("tool_choice: requires tools", param="tool_choice")
    functions = [tool.function for tool in tools if tool.function]
    if name:
        chosen = next((one for one in functions if one.name == name), None)
        if chosen is None:
            raise tool_not_found(name)
        schema = _object(chosen.parameters)
        is_strict = bool(chosen.strict)
    else:
        calls = [_call(one.name, f"#/$defs/tool{number}") for number, one in enumerate(functions)]
        places = [f"tool{number}" for number in range(len(functions))]
        try:
            definitions = {
                place: moved(_object(one.parameters), f"#/$defs/{place}")
                for place, one in zip(places, functions, strict=True)
            }
        except RecursionError:
            raise RequestError("tools: a schema is nested too deeply", param="tools") from None
        schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "$defs": definitions}
        if not is_parallel:
            schema["maxItems"] = 1
        is_strict = all(one.strict for one in functions)
    kind = GrammarKind.JSON_SCHEMA if is_strict else GrammarKind.LENIENT_JSON_SCHEMA
    return Grammar(kind=kind, text=json.dumps(schema))


def _call(name: str, place: str) -> dict[str, Any]:
    """Return the schema of {"name": …, "arguments": …}. place: $ref of the arguments' schema."""
    properties = {"name": {"const": name}, "arguments": {"$ref": place}}
    required = ["name", "arguments"]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _object(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"type": "object", **(parameters or {})}


def tool_not_found(name: str) -> RequestError:
    return RequestError(f"tool_choice: tool {name[:_MAX_NAME]!r} not found in tools", param="tool_choice")
