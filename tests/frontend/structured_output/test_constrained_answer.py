"""Constrained answers: which texts a model can produce, checked by the masks of the compiled grammar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.grammar.compiler import GrammarCompiler
from core.types.errors import RequestError
from core.types.request import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from frontend.chat.chat import Chat
from frontend.chat.output_format import OutputFormat
from frontend.parsers.thinking import THINK
from frontend.structured_output import constrained_answer
from frontend.structured_output.constrained_answer import bound_answer
from frontend.structured_output.lark import without_look_around
from frontend.text.answer_reader import AnswerReader
from frontend.text.completion_request import CompletionRequest
from frontend.text.tokenizer import Tokenizer
from tests.support.masks import accepts

_CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
_ROME = '{"city": "Rome"}'
_POINTS = {"properties": {"x": {"type": "boolean"}, "y": {"$ref": "#/properties/x"}}, "required": ["y"]}
_TOOLS: tuple[dict[str, Any], ...] = (
    {"type": "function", "function": {"name": "look", "parameters": {**_POINTS, "additionalProperties": False}}},
    {"type": "function", "function": {"name": "now"}},
)
_USER = {"role": "user", "content": "hi"}
_HERMES, _LLAMA, _THINKS = OutputFormat("hermes"), OutputFormat("llama3_json"), OutputFormat(tags=THINK)
_LOOK, _NOW = (
    f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    for name, arguments in (("look", '{"y": true}'), ("now", "{}"))
)


@pytest.fixture(scope="module")
def compiler(byte_level_dir: Path, byte_level: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(byte_level_dir, vocab_size=byte_level.vocab_size)


def _request(schema: Any = _CITY, kind: GrammarKind = GrammarKind.JSON_SCHEMA, **chat: Any) -> CompletionRequest:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    grammar = Grammar(kind=kind, text=text)
    return CompletionRequest(id="r", prompt=Chat(messages=(_USER,), **chat), grammar=grammar, grammar_field="field")


def _accepts(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    request: CompletionRequest,
    output_format: OutputFormat,
    text: str,
    prompt: str,
) -> bool:
    """Return whether the grammar accepts the whole text and may end there."""
    grammar = bound_answer(request, output_format, prompt)
    assert grammar is not None
    (end,) = tokenizer.encode("<|im_end|>")
    return accepts(compiler.compile(grammar), tokenizer.encode(text), end)


@pytest.mark.parametrize(
    ("text", "is_accepted"),
    [
        (_ROME, True),
        (_LOOK, True),
        (f"{_LOOK}\n{_NOW}", True),
        (_LOOK.replace("true", "1"), False),
        (_NOW.replace("now", "other"), False),
        (f"{_ROME}\n{_LOOK}", False),
        ("Rome.", False),
    ],
)
def test_answer_or_calls(compiler: GrammarCompiler, byte_level: Tokenizer, text: str, is_accepted: bool) -> None:
    request = _request(tools=_TOOLS)
    assert _accepts(compiler, byte_level, request, _HERMES, text, "") is is_accepted
    assert isinstance(request.prompt, Chat)
    reader = AnswerReader.of(request.prompt, _HERMES, "")
    assert reader is not None
    calls = [call.name for said in (reader.add(text), reader.finish()) for call in said.calls if call.name]
    assert not is_accepted or len(calls) == text.count("<tool_call>"), "and what may be said is read as what it is"


_WRITTEN = {  # the calls look and now
    "kimi_k2": '<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"y": true}'
    "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"y": true}<｜tool▁call▁end｜>'  # noqa: RUF001
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
    "deepseek_v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{"y": true}\n```'  # noqa: RUF001
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"  # noqa: RUF001
    "<｜tool▁calls▁end｜>",  # noqa: RUF001
}


@pytest.mark.parametrize("format", _WRITTEN)
def test_calls_have_the_syntax_of_their_format(format: str, compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    request, output_format, text = _request(tools=_TOOLS), OutputFormat(format), _WRITTEN[format]
    assert _accepts(compiler, byte_level, request, output_format, text, "")
    assert _accepts(compiler, byte_level, request, output_format, _ROME, "")
    for wrong in (text.replace("true", "1"), text.replace("now", "later"), text[: len(text) // 2]):
        assert not _accepts(compiler, byte_level, request, output_format, wrong, "")
    assert isinstance(request.prompt, Chat)
    reader = AnswerReader.of(request.prompt, output_format, "")
    assert reader is not None
    said = [*reader.add(text).calls, *reader.finish().calls]
    assert [(call.name, call.arguments) for call in said if call.name] == [("look", '{"y": true}'), ("now", "{}")]


def test_calls_follow_the_model_family_syntax(compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    one, llama = _request(tools=_TOOLS, is_parallel=False), _request(tools=_TOOLS)
    assert _accepts(compiler, byte_level, one, _HERMES, _LOOK, "")
    assert not _accepts(compiler, byte_level, one, _HERMES, f"{_LOOK}\n{_NOW}", "")
    assert _accepts(compiler, byte_level, llama, _LLAMA, '{"name": "look", "parameters": {"y": true}}', "")


@pytest.mark.parametrize("output_format", [OutputFormat("pythonic"), OutputFormat("mistral")])
def test_unknown_call_syntax_is_rejected(output_format: OutputFormat) -> None:
    with pytest.raises(RequestError, match="cannot be combined with field") as caught:
        bound_answer(_request(tools=_TOOLS), output_format, "")
    assert caught.value.param == "tools"
    with pytest.raises(RequestError, match="cannot be combined"):
        bound_answer(_request("a|b", GrammarKind.REGEX, tools=_TOOLS), _HERMES, "")
    forced = _request(tools=_TOOLS, forced="look")
    assert bound_answer(forced, output_format, "") == forced.grammar, "that is bound to be a call already"


@pytest.mark.parametrize(
    ("prompt", "text", "is_accepted"),
    [
        ("assistant\n", f"<think>\nHm, a {{ or two.\n</think>\n\n{_ROME}", True),
        ("assistant\n", _ROME, True),
        ("assistant\n", f"Hm.</think>{_ROME}", False),
        ("assistant\n<think>\n", f"Hm.\n</think>\n\n{_ROME}", True),
        ("assistant\n<think>\n", f"Hm.</think>{_ROME}</think>", False),
        ("assistant\n<think>\n\n</think>\n\n", _ROME, True),
        ("assistant\n<think>\n\n</think>\n\n", f"<think>Hm.</think>{_ROME}", False),
    ],
)
def test_thinking_precedes_the_answer(
    compiler: GrammarCompiler, byte_level: Tokenizer, prompt: str, text: str, is_accepted: bool
) -> None:
    """Thinking is allowed if the template opened it or left it to the model, not if the template closed it."""
    request = _request()
    assert _accepts(compiler, byte_level, request, _THINKS, text, prompt) is is_accepted
    assert isinstance(request.prompt, Chat)
    reader = AnswerReader.of(request.prompt, _THINKS, prompt, grammar=request.grammar)
    if is_accepted and reader is not None:
        said = [reader.add(text), reader.finish()]
        assert "".join(one.text for one in said) == _ROME
        assert ("Hm" in "".join(one.thinking for one in said)) is ("Hm" in text)


def test_grammar_without_room_for_tools_or_thinking_is_unchanged() -> None:
    for request, output_format in (
        (_request(), OutputFormat()),
        (_request("a|b", GrammarKind.REGEX), _THINKS),
        (_request(is_continued=True), _THINKS),
        (CompletionRequest(id="r", prompt="a", grammar=_request().grammar), _THINKS),
    ):
        assert bound_answer(request, output_format, "assistant\n") == request.grammar


_NOT_ENFORCED: list[dict[str, Any]] = [
    {"type": "string", "pattern": r"(word)\1"},
    {"$ref": "https://example.com/other.json"},
    {"$ref": "#/$defs/missing"},
    {"type": "date"},
    {"type": ["date", "null"]},
    {"type": [{}]},
    {"type": [["string"]]},
    {"$ref": f"#/required/{'9' * 5000}"},  # more digits than Python parses
    {"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 2**63 - 1}]},  # which masks cannot express
]


@pytest.mark.parametrize("inner", _NOT_ENFORCED, ids=lambda inner: str(inner)[:40])
@pytest.mark.parametrize("output_format", [OutputFormat(), _THINKS], ids=["alone", "in a rule"])
def test_unenforceable_parts_are_dropped_unless_strict(
    compiler: GrammarCompiler, byte_level: Tokenizer, inner: dict[str, Any], output_format: OutputFormat
) -> None:
    schema = {"type": "object", "properties": {"a": inner, "pattern": {"const": 1}}, "required": ["a", "pattern"]}
    text = '{"a": "b", "pattern": 1}'
    request = _request(schema, GrammarKind.LENIENT_JSON_SCHEMA)
    assert _accepts(compiler, byte_level, request, output_format, text, "")
    assert not _accepts(compiler, byte_level, request, output_format, text.replace("1", "2"), "")
    with pytest.raises(RequestError):
        _accepts(compiler, byte_level, _request(schema), output_format, text, "")


def test_schema_keeps_its_size_limit(compiler: GrammarCompiler) -> None:
    long = {"enum": ["a" * MAX_GRAMMAR_BYTES, "b"]}
    made = bound_answer(_request(long), _THINKS, "")
    assert made is not None and made.kind is GrammarKind.LARK
    compiler.compile(made)
    for text in (
        f"start: /{'a' * MAX_GRAMMAR_BYTES}/",
        f'start: s\ns: %json {{}} "{"a" * MAX_GRAMMAR_BYTES}"',
        f"start: s\ns: %json [{json.dumps('a' * MAX_GRAMMAR_BYTES)}]",
    ):
        with pytest.raises(RequestError, match="at most"):
            Grammar(kind=GrammarKind.LARK, text=text).check("field")


def test_deeply_nested_schema_is_rejected_by_name() -> None:
    schema: Any = {"type": "string"}
    for _ in range(900):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RequestError, match="too deeply") as rejected:
        bound_answer(_request(schema, GrammarKind.LENIENT_JSON_SCHEMA), OutputFormat(), "")
    assert rejected.value.param == "field"


_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # written by pydantic


@pytest.mark.parametrize(
    ("pattern", "weaker"),
    [
        (_DECIMAL, r"^[+-]?0*\d*\.?\d*$"),
        (r"\bword\b", "word"),
        (r"a(?=b(c|d)*)+e", "ae"),
        (r"(?<!x)(?:y)(?<=z){2}k", "(?:y)k"),
        (r"(?=[)])x", "x"),
        (r"[\b(?=]a", r"[\b(?=]a"),
        (r"\(?=a\\b", r"\(?=a\\b"),
        (r"(a)\1", None),
        (r"(?P<n>a)\k<n>", None),
    ],
)
def test_pattern_without_look_around(pattern: str, weaker: str | None) -> None:
    assert without_look_around(pattern) == weaker


def test_strict_schema_with_look_around_is_weakened_by_name(compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    price = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": _DECIMAL}]}
    schema = {
        "type": "object",
        "properties": {"default": price, "pattern": {"const": r"(?=a)"}},
        "required": ["default", "pattern"],
        "additionalProperties": False,
    }
    request, weakened = constrained_answer.with_weakened_schema(_request(schema))
    assert weakened == ["field.properties.default.anyOf[1].pattern"]
    for value, is_accepted in (('"1.50"', True), ('"1.5x"', False), ("1.5", True)):
        text = f'{{"default": {value}, "pattern": "(?=a)"}}'
        assert _accepts(compiler, byte_level, request, OutputFormat(), text, "") is is_accepted
    secret = {"type": "string", "format": "password", "maxLength": 2}  # as pydantic's SecretStr
    named = {"type": "object", "properties": {"format": secret, "b": {"type": "string", "format": "uuid"}}}
    request, weakened = constrained_answer.with_weakened_schema(_request(named))
    assert weakened == ["field.properties.format.format"]
    for text, is_accepted in (('{"format": "ab"}', True), ('{"format": "abc"}', False), ('{"b": "c"}', False)):
        assert _accepts(compiler, byte_level, request, OutputFormat(), text, "") is is_accepted
    plain = _request({"type": "object"})
    assert constrained_answer.with_weakened_schema(plain) == (plain, [])
    schema["properties"] = {"a": {"type": "string", "pattern": r"(a)\1"}}
    with pytest.raises(RequestError, match=r"field.properties.a.pattern: back-references are not supported"):
        constrained_answer.with_weakened_schema(_request(schema))
