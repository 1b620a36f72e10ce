"""Fields of the OpenAI API that constrain answers, with `tool_choice`, and vLLM's extension of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from core.types.errors import RequestError
from core.types.request import ANY_OBJECT, Grammar, GrammarKind
from frontend.openai.fields import Ignored, Only, OpenAIObject, Unsupported
from frontend.openai.messages import ToolGiven
from frontend.structured_output.lark import moved

_KINDS = ("json_", "json_object", "regex", "choice", "grammar", "structural_tag")  # of structured_outputs
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
            text = "response_format.schema: requires type json_object"
            raise RequestError(text, param="response_format.schema")
        parts = {name: part for name in _OF_TAGS if (part := getattr(self, name)) is not None}
        if parts and self.type != "structural_tag":
            name = f"response_format.{next(iter(parts))}"
            raise RequestError(f"{name}: requires type structural_tag", param=name)
        if self.type == "text":
            return None
        if self.type == "structural_tag":
            return Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=json.dumps(parts))
        if self.type == "json_object":
            return _lenient(self.schema_) if self.schema_ is not None else ANY_OBJECT
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise RequestError("response_format: missing json_schema.schema", param="response_format.json_schema")
        if not self.json_schema.strict:
            return _lenient(self.json_schema.schema_)
        return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(self.json_schema.schema_))


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
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            text = "structured_outputs: set exactly one of json, json_object, regex, choice, grammar and structural_tag"
            raise RequestError(text, param="structured_outputs")
        return f"structured_outputs.{given[0].rstrip('_')}", self._grammar()

    def _grammar(self) -> Grammar:
        if self.json_object:
            return ANY_OBJECT
        if self.json_ is not None:
            text = self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)
            return Grammar(kind=GrammarKind.JSON_SCHEMA, text=text)
        if self.structural_tag is not None:
            tag = self.structural_tag
            text = tag if isinstance(tag, str) else json.dumps(tag)
            return Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=text)
        if self.regex is not None:
            return Grammar(kind=GrammarKind.REGEX, text=self.regex)
        if self.choice is not None:
            return Grammar.of_choice(self.choice, "structured_outputs.choice")
        return Grammar(kind=GrammarKind.LARK, text=self.grammar or "")


def grammar_of(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> dict[str, Any]:
    """Return the grammar fields of a CompletionRequest; empty if unconstrained. Raises RequestError."""
    if structured is not None:
        if response_format is not None and response_format.type != "text":
            text = "structured_outputs: cannot be combined with response_format"
            raise RequestError(text, param="structured_outputs")
        name, grammar = structured.named()
        return {"grammar": grammar, "grammar_field": name}
    if response_format is None or (found := response_format.grammar()) is None:
        return {}
    name = "response_format.json_schema.schema" if response_format.type == "json_schema" else "response_format"
    return {"grammar": found, "grammar_field": name}


def _lenient(schema: dict[str, Any]) -> Grammar:
    return Grammar(kind=GrammarKind.LENIENT_JSON_SCHEMA, text=json.dumps(schema))


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
