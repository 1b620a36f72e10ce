"""Calls in a history: their arguments, which may be any text, and the templates that render them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.types.errors import RequestError
from frontend.chat.call_shape import object_of
from frontend.chat.chat import Chat
from frontend.chat.chat_template import ChatTemplate
from frontend.chat.output_format import OutputFormat
from frontend.parsers.thinking import TAGS, THINK
from frontend.text.answer_reader import AnswerReader
from frontend.text.events import Delta
from tests.support.growth import growth
from tests.support.serving import TEMPLATES

_TEMPLATES = {  # with the format and the thinking tags that they show
    "deepseek_tools": ("deepseek_v3", None),
    "deepseek_v31_tools": ("deepseek_v31", THINK),
    "dsml_tools": ("deepseek_v32", THINK),
    "gemma4_tools": ("gemma4", next(tags for tags in TAGS if tags.closing == "<channel|>")),
    "glm47_tools": ("glm47", THINK),
    "glm_tools": ("glm45", THINK),
    "hermes_tools": ("hermes", None),
    "kimi_tools": ("kimi_k2", None),
    "minimax_tools": ("minimax_m2", THINK),
}
_PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "number": {"type": "number"},
        "is_set": {"type": "boolean"},
        "listed": {"type": "array"},
        "mapped": {"type": "object"},
        "nothing": {"type": "null"},
    },
}
_TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "", "parameters": _PARAMETERS}}
    for name in ("look", "write.file")
)
_USER = {"role": "user", "content": "QUESTION"}
# Without the characters of any format's own tags, which no format can escape in a string.
_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=12)
_words = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
_scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e300, 1e300) | _text
_values = st.recursive(_scalars, lambda of: st.lists(of, max_size=3) | st.dictionaries(_words, of, max_size=3))
_arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": _text,
        "number": st.integers(-(2**53), 2**53) | st.floats(-1e300, 1e300),
        "is_set": st.booleans(),
        "listed": st.lists(_values, max_size=3),
        "mapped": st.dictionaries(_words, _values, max_size=3),
        "nothing": st.none(),
    },
)
_calls = st.lists(st.tuples(st.sampled_from(["look", "write.file"]), _arguments), min_size=1, max_size=3)
_KNOWN = {name: ChatTemplate(TEMPLATES[name], special_tokens={"bos_token": "", "eos_token": ""}) for name in _TEMPLATES}


@pytest.mark.parametrize("name", _TEMPLATES)
def test_template_shows_the_format(name: str) -> None:
    assert OutputFormat.of(_KNOWN[name].sources) == OutputFormat(*_TEMPLATES[name])


@pytest.mark.parametrize(
    ("name", "thinks", "start"),
    [
        ("deepseek_v31_tools", True, "inside"),
        ("deepseek_v31_tools", False, "after"),
        ("dsml_tools", True, "inside"),
        ("gemma4_tools", True, "before"),
        ("gemma4_tools", False, "after"),
        ("glm_tools", True, "before"),
        ("glm_tools", False, "after"),
        ("minimax_tools", True, "inside"),
    ],
)
def test_end_of_the_prompt_shows_where_thinking_begins(name: str, thinks: bool, start: str) -> None:
    template = _KNOWN[name]
    prompt = template.render([_USER], variables=dict.fromkeys(template.switches, thinks))
    assert OutputFormat(*_TEMPLATES[name]).start(Chat(messages=(_USER,)), prompt) == start


@settings(max_examples=settings().max_examples // 4, database=None)
@given(calls=_calls)
@pytest.mark.parametrize("name", _TEMPLATES)
def test_calls_are_rendered_as_the_model_writes_them(name: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    given = [(tool, json.loads(json.dumps(arguments))) for tool, arguments in calls]
    rendered = _rendered(name, [_said("assistant", given), *(_result(f"call_{at}") for at in range(len(given)))])
    assert [(tool, json.loads(of)) for _, tool, of in _read(name, rendered.split("QUESTION")[1])] == given


def test_ids_of_kimi_name_the_call() -> None:
    """Ids of other models are replaced, and its own are kept."""
    own = [(tool, {}) for tool in ("look", "write.file")]
    rendered = _rendered("kimi_tools", [_said("assistant", own), _result("call_1", "A"), _result("call_0", "B")])
    (first, *_), (second, *_) = made = _read("kimi_tools", rendered)
    assert [id for id, *_ in made] == ["functions.look:0", "functions.write.file:1"]
    assert "## Return of functions.write.file:1\nA" in rendered and "## Return of functions.look:0\nB" in rendered
    again = _said("assistant", own)
    for call, id in zip(again["tool_calls"], (first, second), strict=True):
        call["id"] = id
    history = [again, _result(second, "A"), _result(first, "B")]
    assert _rendered("kimi_tools", history) == rendered
    for forced, raw in (("look", "{}"), ("", '[{"name": "look", "arguments": {}}]')):
        ids = [id for id, *_ in _read("kimi_tools", raw, messages=(_USER, *history), forced=forced)]
        assert ids == ["functions.look:2"]


def _said(role: str, calls: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    written = [
        {"id": f"call_{at}", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
        for at, (tool, arguments) in enumerate(calls)
    ]
    return {"role": role, "content": None, "tool_calls": written}


def _result(id: str, text: str = "done") -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": id}


def _rendered(name: str, messages: list[dict[str, Any]]) -> str:
    return _KNOWN[name].render([_USER, *messages], tools=_TOOLS, opens_answer=False)


def _read(name: str, text: str, **fields: Any) -> list[tuple[str, str, str]]:
    """Return the ids, names and arguments of the calls in a text, which arrives in pieces."""
    chat = Chat(**{"messages": (_USER,), "tools": _TOOLS, **fields})
    reader = AnswerReader.of(chat, OutputFormat(_TEMPLATES[name][0]), "")
    assert reader
    delta = Delta(0, "", [], [])
    for part in [*map(reader.add, [text[at : at + 5] for at in range(0, len(text), 5)]), reader.finish()]:
        delta.add(part)
    made: dict[int, tuple[str, str, str]] = {}
    for call in delta.calls:
        assert call.broken is None, text
        id, tool, arguments = made.get(call.number, (call.id, call.name, ""))
        made[call.number] = id, tool, arguments + call.arguments
    return list(made.values())


def test_object_is_accepted() -> None:
    given = {"a": 'x"\\', "b": ["🎉", "\n", 1.5], "{[,": {}}
    for text in (json.dumps(given), json.dumps(given, ensure_ascii=False)):
        assert object_of(text, "p") == given
    assert object_of(" ", "p") == {}


@pytest.mark.parametrize(
    "text",
    [
        '"',
        '{"a',
        '{"a\\',
        '{"a": "\\',
        '{"a": "\\ud800"}',
        '{"\\udc00": 1}',
        "[]",
        '{"a": 1e400}',
        '{"a": "' + "x" * 2**18 + '"}',
    ],
    ids=lambda text: text[:20],
)
def test_other_text_is_rejected_with_its_path(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        object_of(text, "messages[3].tool_calls[0].function.arguments")
    assert caught.value.param == "messages[3].tool_calls[0].function.arguments"


@pytest.mark.parametrize(("text", "end"), [('\\"', ""), ('\\"', "\\"), ('a"', ""), ('"a\\', "")])
def test_unterminated_string_is_scanned_once(text: str, end: str) -> None:
    def reject(size: int) -> None:
        with pytest.raises(RequestError):
            object_of('"' + text * size + end, "p")

    assert growth(reject, 4_000) < 9
