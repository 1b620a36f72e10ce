"""Fields of the OpenAI API that constrain answers, including `tool_choice`, with vLLM's extension of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from core.types.errors import RequestError
from core.types.request import ANY_OBJECT, Grammar, GrammarKind
from frontend.openai.fields import Ignored, Only, OpenAIObject, Unsupported
from frontend.openai.messages import FunctionAsTool
from frontend.structured_output.lark import moved

_KINDS = {  # of structured_outputs, by field
    "json_": GrammarKind.JSON_SCHEMA,
    "json_object": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.REGEX,
    "grammar": GrammarKind.LARK,
    "structural_tag": GrammarKind.STRUCTURAL_TAG,
}
_OF_TAGS = ("format", "structures", "triggers")  # fields of a structural tag


class JsonSchema(OpenAIObject):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(OpenAIObject):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")  # with json_object, as in llama.cpp
    # With structural_tag; validated by frontend.structured_output.lark.
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    def grammar(self) -> Grammar | None:
        """Return the grammar, or None for plain text. Raises RequestError."""
        if self.schema_ is not None and self.type != "json_object":
            raise RequestError.at("response_format.schema", "requires type json_object")
        parts = {name: part for name in _OF_TAGS if (part := getattr(self, name)) is not None}
        if parts and self.type != "structural_tag":
            raise RequestError.at(f"response_format.{next(iter(parts))}", "requires type structural_tag")
        if self.type == "text":
            return None
        if self.type == "structural_tag":
            return Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=json.dumps(parts))
        if self.type == "json_object":
            return _of_schema(self.schema_, is_strict=False) if self.schema_ is not None else ANY_OBJECT
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise RequestError("response_format: missing json_schema.schema", param="response_format.json_schema")
        return _of_schema(self.json_schema.schema_, is_strict=bool(self.json_schema.strict))


class StructuredOutputs(OpenAIObject):
    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    # vLLM's. This server's JSON never contains whitespace chosen by the model.
    disable_any_whitespace: Ignored = None
    disable_fallback: Ignored = None
    disable_additional_properties: Annotated[bool | None, AfterValidator(Only((False,)))] = None
    whitespace_pattern: Unsupported = None
    structural_tag: dict[str, Any] | str | None = None

    def named(self) -> tuple[str, Grammar]:
        """Return the field that is set, and its grammar. Raises RequestError."""
        given = {name: value for name in _KINDS if (value := getattr(self, name)) not in (None, False)}
        if len(given) != 1:
            problem = "set exactly one of json, json_object, regex, choice, grammar and structural_tag"
            raise RequestError.at("structured_outputs", problem)
        ((name, value),) = given.items()
        field = f"structured_outputs.{name.rstrip('_')}"
        if name == "json_object":
            return field, ANY_OBJECT
        if name == "choice":
            return field, Grammar.of_choice(value, field)
        return field, Grammar(kind=_KINDS[name], text=value if isinstance(value, str) else json.dumps(value))


def grammar_of(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> dict[str, Any]:
    """Return the grammar fields of a CompletionRequest; empty if unconstrained. Raises RequestError."""
    if structured is not None:
        if response_format is not None and response_format.type != "text":
            raise RequestError.at("structured_outputs", "cannot be combined with response_format")
        name, grammar = structured.named()
        return {"grammar": grammar, "grammar_field": name}
    if response_format is None or (found := response_format.grammar()) is None:
        return {}
    name = "response_format.json_schema.schema" if response_format.type == "json_schema" else "response_format"
    return {"grammar": found, "grammar_field": name}


def _of_schema(schema: dict[str, Any], *, is_strict: bool) -> Grammar:
    kind = GrammarKind.JSON_SCHEMA if is_strict else GrammarKind.LENIENT_JSON_SCHEMA
    return Grammar(kind=kind, text=json.dumps(schema))


_MAX_NAME = 128  # characters in an error message


def forced_grammar(name: str, functions: Sequence[FunctionAsTool], *, is_parallel: bool) -> Grammar:
    """Return the grammar of the named tool's arguments; for "", of a list of calls of any tool. Raises RequestError."""
    if not functions:
        raise RequestError.at("tool_choice", "requires tools")
    if name:
        chosen = next((one for one in functions if one.name == name), None)
        if chosen is None:
            raise tool_not_found(name)
        return _of_schema(_object(chosen.parameters), is_strict=bool(chosen.strict))
    calls, definitions = [], {}
    for number, one in enumerate(functions):
        place = f"#/$defs/tool{number}"
        properties = {"name": {"const": one.name}, "arguments": {"$ref": place}}
        required = ["name", "arguments"]
        calls.append({"type": "object", "properties": properties, "required": required, "additionalProperties": False})
        try:
            definitions[f"tool{number}"] = moved(_object(one.parameters), place)
        except RecursionError:
            raise RequestError.at("tools", "a schema is nested too deeply") from None
    schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "$defs": definitions}
    if not is_parallel:
        schema["maxItems"] = 1
    return _of_schema(schema, is_strict=all(one.strict for one in functions))


def _object(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"type": "object", **(parameters or {})}


def tool_not_found(name: str) -> RequestError:
    return RequestError.at("tool_choice", f"tool {name[:_MAX_NAME]!r} not found in tools")
