"""Constraint fields under OpenAI's, vLLM's and llama.cpp's names."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from core.grammar.compiler import GrammarCompiler
from core.rpc import inference_pb2 as pb
from core.types.errors import RequestError
from core.types.request import ANY_OBJECT, Grammar, GrammarKind
from frontend.anthropic.types import MessagesBody
from frontend.grpc.messages import request_of
from frontend.http.request_contexts import GenerationBody
from frontend.openai.constraints import forced_grammar
from frontend.openai.fields import ignored_header
from frontend.openai.messages import FunctionAsTool
from frontend.openai.types import ChatBody, TextBody
from frontend.responses.types import ResponsesBody
from frontend.text.completion_request import CompletionRequest
from tests.support.masks import make_compiler
from tests.support.serving import USER

_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_STRICT, _LENIENT = (
    Grammar(kind=kind, text=json.dumps(_SCHEMA)) for kind in (GrammarKind.JSON_SCHEMA, GrammarKind.LENIENT_JSON_SCHEMA)
)
_FORMAT = {"type": "const_string", "value": "a"}
_OLD = {"structures": [{"begin": "<a>", "schema": _SCHEMA, "end": "</a>"}], "triggers": ["<a"]}
_TAG = Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=json.dumps({"format": _FORMAT}))


_WITHOUT_EFFECT = {
    **dict.fromkeys(("regex", "whitespace_pattern", "structural_tag")),
    **dict.fromkeys(("json_object", "disable_additional_properties"), False),
    **dict.fromkeys(("disable_any_whitespace", "disable_fallback"), True),
}


def _json_schema(**more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA, **more}}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": {"type": "json_object", "schema": _SCHEMA}}, _LENIENT),
        ({"response_format": {"type": "json_object", "schema": None, "json_schema": None}}, ANY_OBJECT),
        (_json_schema(), _LENIENT),
        (_json_schema(strict=True), _STRICT),
        ({"structured_outputs": {"json": _SCHEMA, **_WITHOUT_EFFECT}}, _STRICT),
        ({"response_format": {"type": "structural_tag", "format": _FORMAT}}, _TAG),
        ({"response_format": {"type": "structural_tag", **_OLD}}, replace(_TAG, text=json.dumps(_OLD))),
        ({"structured_outputs": {"structural_tag": json.dumps({"format": _FORMAT})}}, _TAG),
        ({"structured_outputs": {"structural_tag": {"format": _FORMAT}}}, _TAG),
    ],
    ids=lambda value: str(value)[:60],
)
def test_constraints_under_all_names(fields: dict[str, Any], expected: Grammar) -> None:
    body = TextBody.model_validate_json(json.dumps({"prompt": "a", **fields}))
    (request,) = body.requests("r")
    assert request.grammar == expected and not ignored_header(body)


def test_structural_tag_fields_require_the_type() -> None:
    body = TextBody.model_validate({"prompt": "a", "response_format": {"type": "json_object", "format": _FORMAT}})
    with pytest.raises(RequestError, match="requires type structural_tag") as rejected:
        body.requests("r")
    assert rejected.value.param == "response_format.format"


def test_unknown_fields_are_ignored_and_listed() -> None:
    form = {"type": "json_schema", "mood": 1, "json_schema": {"name": "s", "schema": _SCHEMA, "note": 1, "more": None}}
    body = TextBody.model_validate_json(json.dumps({"prompt": "a", "response_format": form}))
    named = set(ignored_header(body)["x-ignored-fields"].split(", "))
    assert named == {"response_format.mood", "response_format.json_schema.note"}


_SCHEMAS: dict[str, dict[str, Any]] = {
    "a property": {"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}, "required": ["a", "b"]},
    "itself": {"properties": {"a": {"type": "integer"}, "next": {"$ref": "#"}}, "required": ["a"]},
    "definitions": {
        "$id": "https://example.com/tool",
        "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#/definitions/x"}},
        "$defs": {"x": {"enum": [1, 2]}},
        "definitions": {"x": {"type": "string"}},
    },
    "one definition by another": {
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/y"}, {"type": "null"}]}, "y": {"enum": [1]}},
    },
    "what only looks like one": {"properties": {"a": {"const": {"$ref": "#"}}, "$ref": {"type": "string"}}},
}
_VALUES: list[Any] = [1, 3, "x", None, {"$ref": "#"}, {"a": 1}, {"name": "f", "arguments": {}}]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return make_compiler(tmp_path_factory.mktemp("model"))


def _tool(name: str, schema: dict[str, Any]) -> FunctionAsTool:
    return FunctionAsTool(
        name=name, parameters={"type": "object", "additionalProperties": False, **schema}, strict=True
    )


@pytest.mark.parametrize("case", _SCHEMAS)
def test_required_call_matches_the_chosen_tools_schema(compiler: GrammarCompiler, case: str) -> None:
    tool, other = _tool("f", _SCHEMAS[case]), _tool("g", _SCHEMAS["a property"])
    grammar = forced_grammar("", [other, tool], is_parallel=True)
    compiler.compile(grammar)
    alone = Draft202012Validator(json.loads(forced_grammar("f", [tool], is_parallel=True).text))
    together = Draft202012Validator(json.loads(grammar.text))
    given = [
        {name: value, **more} for name in ("a", "b", "next", "$ref") for value in _VALUES for more in ({}, {"a": 1})
    ]
    allowed = [alone.is_valid(arguments) for arguments in given]
    assert [together.is_valid([{"name": "f", "arguments": arguments}]) for arguments in given] == allowed
    assert {True, False} == set(allowed), "some are allowed, and some are not"


def test_references_stay_within_a_tool(compiler: GrammarCompiler) -> None:
    """References must not point into another tool or the list of calls."""
    text = forced_grammar("", [_tool("f", _SCHEMAS["itself"])], is_parallel=False).text
    listed = Draft202012Validator(json.loads(text))
    assert listed.is_valid([{"name": "f", "arguments": {"a": 1, "next": {"a": 2}}}])
    assert not listed.is_valid([{"name": "f", "arguments": {"a": 1, "next": [{"name": "f", "arguments": {"a": 1}}]}}])


def test_schemas_are_strict_only_if_all_tools_are() -> None:
    strict, other = _tool("f", {}), FunctionAsTool(name="g")
    whole, lenient = GrammarKind.JSON_SCHEMA, GrammarKind.LENIENT_JSON_SCHEMA
    for name, tools, kind in [
        ("f", [strict, other], whole),
        ("g", [strict, other], lenient),
        ("", [strict], whole),
        ("", [strict, other], lenient),
    ]:
        assert forced_grammar(name, tools, is_parallel=True).kind is kind


def test_deeply_nested_schema_is_rejected_by_name() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(900):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RequestError, match="too deeply") as rejected:
        forced_grammar("", [_tool("f", {"properties": {"a": schema}})], is_parallel=True)
    assert rejected.value.param == "tools"


_ARGUMENTS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
_BOUND: dict[type[GenerationBody], dict[str, Any]] = {
    ChatBody: {
        "messages": USER,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": _ARGUMENTS}}],
        "tool_choice": "required",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}},
    },
    ResponsesBody: {
        "input": "hi",
        "tools": [{"type": "function", "name": "f", "parameters": _ARGUMENTS}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "array"}}},
    },
    MessagesBody: {
        "messages": USER,
        "max_tokens": 9,
        "tools": [{"name": "f", "input_schema": _ARGUMENTS}],
        "tool_choice": {"type": "any"},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "array"}}},
    },
}


@pytest.mark.parametrize("kind", _BOUND, ids=lambda kind: kind.__name__)
def test_text_format_does_not_affect_a_required_call(kind: type[GenerationBody]) -> None:
    """instructor sends both, as does an agent with an output type whose first answer must be a call."""
    fields = _BOUND[kind]
    without = {
        name: value for name, value in fields.items() if name not in ("response_format", "text", "output_config")
    }
    asked, bare = ((kind.model_validate(body).requests("r")) for body in (fields, without))
    assert without != fields and asked == bare and asked[0].grammar_field == "tools"


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("kind", [ChatBody, ResponsesBody], ids=lambda kind: kind.__name__)
def test_allowed_tools_hide_the_others(kind: type[GenerationBody], mode: str) -> None:
    """Both APIs take the form of either; a hosted tool is skipped, as in `tools`."""
    functions = [{"name": name, "parameters": _ARGUMENTS} for name in ("f", "g", "h")]
    nested = [{"type": "function", "function": one} for one in functions]
    flat = [{"type": "function", **one} for one in functions]
    web = {"type": "web_search"}

    def asked(tools: list[Any], choice: Any) -> CompletionRequest:
        in_chat: dict[str, Any] = {"messages": USER, "tools": nested}
        given = in_chat if kind is ChatBody else {"input": "hi", "tools": flat}
        given["tools"] = [tool for tool in given["tools"] if tool in tools or not isinstance(choice, str)]
        (request,) = kind.model_validate({**given, "tool_choice": choice}).requests("r")
        return request

    without_g = asked([nested[0], nested[2], flat[0], flat[2]], mode)
    for choice in (
        {"type": "allowed_tools", "mode": mode, "tools": [web, flat[2], flat[0]]},
        {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [nested[0], nested[2]]}},
    ):
        assert asked([], choice) == without_g
    with pytest.raises(RequestError, match="tool 'x' not found"):
        asked([], {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "x"}]})


def test_grpc_tools_keep_strict_and_an_empty_choice_is_auto() -> None:
    user, strict, other = pb.ChatMessage(role="user", content="hi"), pb.Tool(name="f", strict=True), pb.Tool(name="g")
    for choice, tools, kind in [
        (pb.ToolChoice(required=True), [strict], GrammarKind.JSON_SCHEMA),
        (pb.ToolChoice(required=True), [strict, other], GrammarKind.LENIENT_JSON_SCHEMA),
        (pb.ToolChoice(name="f"), [strict, other], GrammarKind.JSON_SCHEMA),
        (pb.ToolChoice(required=False), [strict], None),
        (pb.ToolChoice(name=""), [strict], None),
        (pb.ToolChoice(none=False), [strict], None),
    ]:
        message = pb.GenerateRequest(chat=pb.Chat(messages=[user], tools=tools, tool_choice=choice))
        grammar = request_of(message, deadline_s=None, max_context=64).grammar
        assert (grammar and grammar.kind) is kind
