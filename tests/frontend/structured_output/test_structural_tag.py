"""Structural tags, checked by the masks of the compiled grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.grammar.compiler import GrammarCompiler
from core.types.errors import RequestError
from core.types.request import Grammar, GrammarKind
from frontend.chat.chat import Chat
from frontend.chat.output_format import OutputFormat
from frontend.parsers.thinking import THINK
from frontend.structured_output.constrained_answer import bound_answer
from frontend.text.completion_request import CompletionRequest
from tests.support.masks import accepts, character_ids, make_compiler

_CITY = {"type": "object", "properties": {"c": {"enum": ["Rome"]}}, "required": ["c"], "additionalProperties": False}
_ROME = '{"c": "Rome"}'
_USER = {"role": "user", "content": "hi"}


def _json(schema: Any = _CITY) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def _tag(begin: str, content: Any = None, end: Any = "</f>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content or _json(), "end": end}


def _const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


_ANY = {"type": "any_text"}
_LOOK, _NOW, _WAIT = (
    _tag("<f=look>"),
    _tag("<f=now>", _json({"const": {}})),
    _tag("@wait ", _json({"type": "integer"}), ""),
)
_TAGS: dict[str, Any] = {"type": "triggered_tags", "triggers": ["<f=", "@"], "tags": [_LOOK, _NOW, _WAIT]}
_OLD = {
    "structures": [{"begin": "<f=look>", "schema": _CITY, "end": "</f>"}],
    "triggers": ["<f="],
}
_LIST: dict[str, Any] = {"type": "tags_with_separator", "tags": [_LOOK, _NOW], "separator": "; "}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return make_compiler(tmp_path_factory.mktemp("letters"), vocab_size=131)


def _request(asked: Any, **chat: Any) -> CompletionRequest:
    text = asked if isinstance(asked, str) else json.dumps({"type": "structural_tag", **asked})
    grammar = Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=text)
    return CompletionRequest(id="r", prompt=Chat(messages=(_USER,), **chat), grammar=grammar, grammar_field="field")


def _accepts(
    compiler: GrammarCompiler, asked: Any, text: str, *, thinks: bool = False, prompt: str = "", **chat: Any
) -> bool:
    """Return whether the grammar accepts the whole text and may end there."""
    grammar = bound_answer(_request(asked, **chat), OutputFormat(tags=THINK if thinks else None), prompt)
    assert grammar is not None and grammar.kind is GrammarKind.LARK
    return accepts(compiler.compile(grammar), character_ids(text))


@pytest.mark.parametrize("asked", [{"format": _TAGS}, _OLD])
@pytest.mark.parametrize(
    ("text", "is_accepted"),
    [
        ("Hello.", True),
        ("", True),
        (f"Hm. <f=look>{_ROME}</f> so", True),
        (f"<f=look>{_ROME}</f><f=look>{_ROME}</f>", True),
        ("a <f <f", True),  # not a trigger yet
        ("a <f=", False),
        ("a <f=other>", False),
        ("<f=look>{}</f>", False),
        (f"<f=look>{_ROME}", False),
        (f"<f=look>{_ROME}</f> <f=look>x", False),
    ],
)
def test_free_text_until_a_trigger(
    compiler: GrammarCompiler, asked: dict[str, Any], text: str, is_accepted: bool
) -> None:
    assert _accepts(compiler, asked, text) is is_accepted


@pytest.mark.parametrize(
    ("form", "said", "unsaid"),
    [
        (_TAGS, ["@wait 12", "a@wait 1 b<f=now>{}</f>"], ["a@b", "<f=now>{ }</f>"]),
        ({**_TAGS, "at_least_one": True}, [f"<f=look>{_ROME}</f> and", "@wait 1<f=now>{}</f>"], ["", "a<f=now>{}</f>"]),
        ({**_TAGS, "stop_after_first": True}, ["", "abc", "abc<f=now>{}</f>"], ["<f=now>{}</f>a"]),
        ({**_TAGS, "at_least_one": True, "stop_after_first": True}, ["<f=now>{}</f>"], ["", "a", "<f=now>{}</f>a"]),
        (_LIST, ["", "<f=now>{}</f>", f"<f=now>{{}}</f>; <f=look>{_ROME}</f>"], ["a", "<f=now>{}</f>; "]),
        ({**_LIST, "at_least_one": True}, ["<f=now>{}</f>; <f=now>{}</f>"], [""]),
        ({**_LIST, "stop_after_first": True}, ["", "<f=now>{}</f>"], ["<f=now>{}</f>; <f=now>{}</f>"]),
        ({**_LIST, "separator": ""}, ["<f=now>{}</f><f=now>{}</f>"], ["<f=now>{}</f> "]),
        (_const('a"\\b'), ['a"\\b'], ["a", ""]),
        (_ANY, ["", "anything <f=", "</f>"], []),
        (_json(True), ["1", '"a"'], ["a"]),
        ({"type": "sequence", "elements": [_const("So: "), _json(), _ANY]}, [f"So: {_ROME} a"], ["So: a", _ROME]),
        ({"type": "or", "elements": [_const("yes"), _const("yes, sir"), _json()]}, ["yes, sir", "yes", _ROME], ["no"]),
        (_tag("<a>", _ANY, "</a>"), ["<a>b</</a>"], ["<a>b", "<a></a>c", "<a></a></a>"]),
        (_tag("<a>", _ANY, ["</a>", "!"]), ["<a>b!", "<a></a>"], ["<a>b!c"]),
        (_tag("<a>", _json(), ""), [f"<a>{_ROME}"], [f"<a>{_ROME} "]),
        (_tag("<a>", _TAGS, "</a>"), ["<a>b<f=now>{}</f>c</a>", "<a></a>"], ["<a>b<f=now></a>", "<a></a>a", "<a>"]),
        (_tag("<a>", {"type": "or", "elements": [_const("b"), _tag("c", _ANY, "d")]}, "</a>"), ["<a>b</a>",
         "<a>c</a>d</a>"], ["<a>c</a>", "<a>b"]),
        (_tag("<a>", {"type": "or", "elements": [_const("b"), {"type": "sequence", "elements": [_const("c"), _ANY]}]},
         "!"), ["<a>b!", "<a>c?!"], ["<a>c", "<a>d!"]),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)  # fmt: skip
def test_every_format(compiler: GrammarCompiler, form: dict[str, Any], said: list[str], unsaid: list[str]) -> None:
    assert [text for text in said if not _accepts(compiler, {"format": form}, text)] == []
    assert [text for text in unsaid if _accepts(compiler, {"format": form}, text)] == []


@pytest.mark.parametrize(
    ("prompt", "text", "is_accepted"),
    [
        ("<think>", f"a <f=?</think>\n\nb <f=look>{_ROME}</f>", True),
        ("<think>", "a</think>b <f=?", False),
        ("", f"<think>a <f=?</think>b<f=look>{_ROME}</f>", True),
        ("", "b <f=?", False),
        ("", "b", True),
        ("<think></think>", "<f=?", False),
    ],
)
def test_thinking_precedes_the_tags(compiler: GrammarCompiler, prompt: str, text: str, is_accepted: bool) -> None:
    """Triggers are ignored inside thinking."""
    assert _accepts(compiler, _OLD, text.replace("\n", ""), thinks=True, prompt=prompt) is is_accepted


def test_tags_replace_tool_calls(compiler: GrammarCompiler) -> None:
    tools = ({"type": "function", "function": {"name": "look"}},)
    assert _accepts(compiler, _OLD, f"<f=look>{_ROME}</f>", tools=tools)
    assert not _accepts(compiler, _OLD, "<f=see>", tools=tools)


_WRONG: list[tuple[Any, str]] = [
    ("[", "field: must be an object such as"),
    ("[]", "field: must be an object such as"),
    ('{"type": "json_schema"}', "field: must be an object such as"),
    ({}, "field: must have either format, or structures and triggers"),
    ({"structures": [1], "triggers": ["a"]}, "field: structures[0] must be an object of"),
    ({"structures": [{"begin": "a", "end": "b"}], "triggers": ["a"]},
     "field: structures.tags[0].content.json_schema is"),
    ({"format": _ANY, "triggers": ["a"]},
     "field: must have either format, or structures and triggers, and nothing else"),
    ({"format": _ANY, "mood": 1}, "field: must have either format, or structures and triggers, and nothing else"),
    ({"structures": {}, "triggers": ["a"]}, "field: must have lists of structures and triggers"),
    ({"format": 1}, "field: format must be an object"),
    ({"format": {"type": []}}, "field: format.type '[]' is not supported"),
    ({"format": {}}, "field: format.type 'None' is not supported"),
    ({"format": {"type": "grammar", "grammar": "a"}}, "field: format.type 'grammar' is not supported"),
    ({"format": {"type": "sequence", "elements": []}}, "field: format.elements must have 1 to 512"),
    ({"format": {"type": "or", "elements": [_ANY] * 513}}, "field: format.elements must have 1 to 512"),
    ({"format": {"type": "or", "elements": [1]}}, "field: format.elements[0] must be an object"),
    ({"format": {"type": "sequence", "elements": [_ANY, _ANY]}}, "field: format.elements[0] is free text"),
    ({"format": {**_ANY, "excludes": ["a"]}}, "field: format.excludes is not supported"),
    ({"format": {**_ANY, "max_tokens": 5}}, "field: format.max_tokens is not supported"),
    ({"format": {**_json(), "style": "qwen_xml"}}, "field: format.style is not supported"),
    ({"format": {"type": "const_string"}}, "field: format.value is required"),
    ({"format": {"type": "const_string", "value": 1}}, "field: format.value has a wrong type"),
    ({"format": _tag("a", _ANY, "")}, "field: format.end must not be empty after free text"),
    ({"format": _tag("a", _json(), [1])}, "field: format.end must be a string, or a list"),
    ({"format": _tag("a", _json(), ["b"] * 17)}, "field: format.end must be a string, or a list"),
    ({"format": {**_TAGS, "triggers": ["<f="]}}, "field: format.tags[2].begin must begin with exactly one trigger"),
    ({"format": {**_TAGS, "triggers": ["<f=", "@", "<f"]}}, "field: format.tags[0].begin must begin with exactly one"),
    ({"format": {**_TAGS, "triggers": ["<f=", "@", "!"]}}, "field: format.triggers has '!', with which no tag begins"),
    ({"format": {**_TAGS, "triggers": ["<f=", ""]}}, "field: format.triggers must be non-empty strings"),
    ({"format": {**_TAGS, "tags": [_ANY]}}, "field: format.tags[0].type 'any_text' is not supported; supported: tag"),
    ({"format": {**_TAGS, "at_least_one": 1}}, "field: format.at_least_one is not supported"),
    ({"format": _const("a" * 70_000)}, "field: at most 65536 bytes are accepted"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "says"), _WRONG, ids=[says[7:] for _, says in _WRONG])
def test_unsupported_format_is_rejected_with_its_path(asked: Any, says: str) -> None:
    with pytest.raises(RequestError) as rejected:
        bound_answer(_request(asked), OutputFormat(), "")
    assert str(rejected.value).startswith(says) and rejected.value.param == "field"


def test_invalid_unicode_is_rejected(compiler: GrammarCompiler) -> None:
    made = bound_answer(_request('{"format": {"type": "const_string", "value": "\\ud800"}}'), OutputFormat(), "")
    assert made is not None
    with pytest.raises(RequestError):
        compiler.compile(made)


def test_deeply_nested_formats_are_rejected() -> None:
    deep = '{"type": "or", "elements": [' * 400 + json.dumps(_ANY) + "]}" * 400
    with pytest.raises(RequestError, match="too deeply"):
        bound_answer(_request(f'{{"format": {deep}}}'), OutputFormat(), "")


def test_const_string_has_the_size_limit_of_a_grammar(compiler: GrammarCompiler) -> None:
    long = {"type": "object", "properties": {f"p{i}": {"const": "a" * 50} for i in range(200)}}
    kept = bound_answer(_request({"format": _json(long)}), OutputFormat(), "")
    assert kept is not None and compiler.compile(kept)
    made = bound_answer(_request({"format": _const("a" * 9000)}), OutputFormat(), "")
    assert made is not None
    with pytest.raises(RequestError, match="at most 8192 bytes"):
        compiler.compile(made)


def test_shared_parts_are_written_once() -> None:
    parts = {"type": "or", "elements": [{"type": "or", "elements": [_ANY, _const("a")] * 150}] * 3}
    text = json.dumps({"format": _tag("a", parts, "e" * 30_000)})
    made = bound_answer(_request(text), OutputFormat(), "")
    assert made is not None and len(made.text) < 3 * len(text)


@pytest.mark.parametrize(
    "character", ["\x7f", "\x85", "\u2028", "\ufeff", "\n", "\0", '"', "\\", "/", "\\u0041", "%json {}"]
)
def test_text_is_taken_literally(compiler: GrammarCompiler, character: str) -> None:
    said = f"a{character}b"
    for form in (_const(said), _tag(said, _ANY, said), {**_TAGS, "triggers": [said], "tags": [_tag(said, end=said)]}):
        made = bound_answer(_request({"format": form}), OutputFormat(), "")
        assert made is not None and compiler.compile(made)
    assert compiler.compile(Grammar.of_choice([said], "field"))


_NAMES = ["value", "json_schema", "elements", "begin", "content", "end", "triggers", "tags", "separator", "excludes"]
_LEAVES = st.one_of(
    st.sampled_from(["", "a", "<f=", "</f>", "\n", 'a"\\']), st.none(), st.booleans(), st.integers(-1, 2)
)
_ANYTHING = st.recursive(
    st.one_of(_LEAVES, st.sampled_from([_ANY, _LOOK, _TAGS, _LIST, _json(), _const("b")])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(_NAMES), inner, max_size=3),
        st.builds(
            lambda kind, fields: {**fields, "type": kind},
            st.sampled_from(["sequence", "or", "tag", "triggered_tags", "tags_with_separator", "json_schema"]),
            st.fixed_dictionaries({}, optional={name: inner for name in _NAMES}),
        ),
    ),
    max_leaves=12,
)


@settings(
    max_examples=2 * settings().max_examples,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(form=_ANYTHING)
def test_any_input_compiles_or_is_rejected(form: Any, compiler: GrammarCompiler) -> None:
    try:
        made = bound_answer(_request({"format": form}), OutputFormat(), "")
        assert made is not None
        compiler.compile(made, param="field")
    except RequestError as error:
        assert error.param == "field"
