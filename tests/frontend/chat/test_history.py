"""Conversations as clients send them, in templates of many families: nothing is rejected, and no text is lost."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from frontend import chat
from frontend.chat.chat_template import ChatTemplate
from frontend.chat.history import History, tools_as_text
from tests.support.serving import TEMPLATES
from tests.support.tiny_tokenizers import CHATML

_OURS = {path.stem: path.read_text() for path in Path(chat.__file__).parent.glob("*.jinja")}
_OURS["mistral"] = "{% set version = 11 %}{% set thought = [] %}" + _OURS["mistral"]
_ONLY_WITH_TOOLS = (  # it loops over tools unasked, and drops the text beside calls
    "{% for tool in tools %}{{ tool|tojson }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.tool_calls is defined %}{% for call in m.tool_calls %}"
    "{{ call.function.name }}({{ call.function.arguments|tojson }}){% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
_BY_ID = (  # it prints neighbouring results together, and drops one with an id that it has seen
    "{% set seen = namespace(ids=[]) %}{% for m in messages %}{% if m.role != 'tool' %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or () %}{{ m.tool_plan }}{{ call.function.name }}"
    "({{ call.function.arguments|tojson }}){% endfor %}"
    "{% elif m.tool_call_id not in seen.ids %}<|tool|>{{ m.content }}{% for other in messages[loop.index:] %}"
    "{% if other.role != 'tool' %}{% break %}{% endif %}|{{ other.content }}"
    "{% set seen.ids = seen.ids + [other.tool_call_id] %}{% endfor %}{% endif %}{% endfor %}{{ tools }}"
)
_TEMPLATES = {**TEMPLATES, "chatml": CHATML, **_OURS, "only_with_tools": _ONLY_WITH_TOOLS, "by_id": _BY_ID}
_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}


def _template(name: str) -> ChatTemplate:
    return ChatTemplate(_TEMPLATES[name], special_tokens=_TOKENS)


def _say(role: str, content: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _call(arguments: str = "{}", id: str | None = "call_0123456789abcdef", name: str = "look") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "function": function, **({"id": id} if id else {})}


_S, _D, _U, _A = (_say(role, role[0].upper()) for role in ("system", "developer", "user", "assistant"))
_CALLED = _say("assistant", tool_calls=[_call()])
_RESULT = _say("tool", "R", tool_call_id="call_0123456789abcdef")


def _user(text: str) -> str:
    return f"[INST] {text} [/INST]"


# Conversations for the template in the style of Llama 2, which demands that turns alternate, without tools.
_STRICT = {
    "instructions and a developer": ([_S, _D, _U], "[INST] <<SYS>>\nS\n\nD\n<</SYS>>\n\nU [/INST]"),
    "a late developer": ([_S, _U, _D, _say("user", "V")], "[INST] <<SYS>>\nS\n<</SYS>>\n\nU\n\nD\n\nV [/INST]"),
    "two users": ([_U, _say("user", "V")], "[INST] U\n\nV [/INST]"),
    "an assistant first": ([_A, _U], None),
    "two assistants": ([_U, _A, _say("assistant", "B"), _U], None),
    "instructions alone": ([_S, _D], "[INST] S\n\nD [/INST]"),
    "a call and its result": ([_U, _CALLED, _RESULT], None),
}


@pytest.mark.parametrize("case", _STRICT)
def test_strict_template_gets_turns(case: str) -> None:
    messages, expected = _STRICT[case]
    rendered = _template("llama2").render(messages)
    if expected:
        assert rendered.removeprefix("<s>").strip() == expected
    for message in messages:
        assert (message["content"] or "look") in rendered


def test_permissive_template_keeps_the_order() -> None:
    """Only instructions in a row are merged, since a model was trained on one system message."""
    rendered = _template("chatml").render([_S, _D, _U, _say("user", "V"), _D, _U])
    blocks = [block.split("<|im_end|>")[0] for block in rendered.split("<|im_start|>")[1:-1]]
    assert blocks == ["system\nS\n\nD", "user\nU", "user\nV", "system\nD", "user\nU"]


@pytest.mark.parametrize("id", ["call_0123456789abcdef", "a1", "abcdefghi", "", None])
def test_ids_fit_the_template(id: str | None) -> None:
    answered = _say("tool", "R") if id is None else _say("tool", "R", tool_call_id=id)
    rendered = _template("mistral_tools").render([_U, _say("assistant", tool_calls=[_call(id=id)]), answered])
    _, made = rendered.split("R", 1)[0].split('{"name"')[0], rendered.split("[TOOL_RESULTS] R")[1][:9]
    assert rendered.count(made) == 2 and made.isalnum() and (id != "abcdefghi" or made == id)


def test_parallel_calls_are_given_one_by_one() -> None:
    calls = [_call(name="look_1", id="a"), _call(name="look_2", id="b")]
    results = [_say("tool", "second", tool_call_id="b"), _say("tool", "first", tool_call_id="a")]
    rendered = _template("llama31_tools").render([_U, _say("assistant", "Both.", tool_calls=calls), *results])
    order = [rendered.index(text) for text in ("Both.", "look_1", "first", "look_2", "second")]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("ids", "order"),
    [(("b", "a"), ["second", "first"]), (("a", "b"), ["first", "second"]), (("b", "x"), ["first", "second"])],
)
def test_results_come_in_the_order_of_their_calls(ids: tuple[str, str], order: list[str]) -> None:
    """A template without ids leaves it to the order which result belongs to which call."""
    calls = [_call(name="look_1", id="a"), _call(name="look_2", id="b")]
    results = [_say("tool", text, tool_call_id=id) for text, id in zip(("first", "second"), ids, strict=True)]
    rendered = _template("hermes_tools").render([_U, _say("assistant", tool_calls=calls), *results])
    assert sorted(order, key=rendered.index) == order


def test_merged_messages_keep_their_texts_thoughts_and_calls() -> None:
    said = [_say("assistant", name, tool_calls=[_call(name=name)], reasoning_content=f"{name}?") for name in "ab"]
    _, merged = History(keeps_assistants=False).arranged([_U, *said])
    assert (merged["content"], merged["reasoning_content"]) == ("a\n\nb", "a?\n\nb?")
    assert [call["function"]["name"] for call in merged["tool_calls"]] == ["a", "b"]


@pytest.mark.parametrize(("name", "shown"), [("channels", True), ("by_id", True), ("hermes_tools", False)])
def test_thoughts_are_given_by_the_templates_name(name: str, shown: bool) -> None:
    said = _say("assistant", "T", tool_calls=[_call()], reasoning_content="THOUGHT")
    rendered = _template(name).render([_U, said, _RESULT])
    assert ("THOUGHT" in rendered) is shown and "T" in rendered


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["no tools", "tools"])
def test_text_beside_calls_goes_before_them(tools: list[dict[str, Any]]) -> None:
    """Also in a history with calls and without tools, which the template for tools renders."""
    template = ChatTemplate({"default": CHATML, "tool_use": _ONLY_WITH_TOOLS}, special_tokens=_TOKENS)
    rendered = template.render([_U, _say("assistant", "T", tool_calls=[_call()]), _RESULT], tools=tools)
    assert rendered.endswith("<|user|>U<|assistant|>T<|assistant|>look({})<|tool|>R")
    assert ("parameters" in rendered) is bool(tools)


def test_repeated_ids_lose_no_result() -> None:
    """Each result keeps its call's id; clients that send no ids, or the same ones in each turn, are answered too."""
    turn = [_say("assistant", tool_calls=[_call(id="x"), _call(id="x")])]
    turn += [_say("tool", text, tool_call_id="x") for text in ("first", "second")]
    history = History(keeps_repeated_ids=False).arranged([_U, *turn, *turn, _say("tool", "orphan")])
    calls = [call["id"] for message in history for call in message.get("tool_calls", ())]
    results = [message["tool_call_id"] for message in history if message["role"] == "tool"]
    assert results[:4] == calls and len({*results}) == 5
    assert _template("by_id").render([_U, *turn, _U, *turn]).count("<|tool|>first|second") == 2


_NEED_OBJECTS = {"coder_tools", "dsml_tools", "glm_tools", "glm47_tools", "minimax_tools"}
_WORDS = [f"word{number}x" for number in range(200)]


def random_conversation(rng: random.Random) -> list[dict[str, Any]]:
    """Return any order of roles, with broken arguments, odd ids, empty texts and orphans."""
    words = iter(rng.sample(_WORDS, len(_WORDS)))
    messages: list[dict[str, Any]] = []
    for _ in range(rng.randint(1, 9)):
        role = rng.choice(["system", "developer", "user", "user", "assistant", "assistant", "call", "call", "tool"])
        text = rng.choice(["", next(words), next(words), f"{next(words)}\n{{{{ '{{% x'"])
        if role == "call":
            broken = ["{}", "null", "", '{"cmd": "', "[]", f'{{"a": "{next(words)}"}}', f"ls {next(words)}"]
            ids = ["abcdefghi", f"toolu_{next(words)}", None]
            calls = [_call(rng.choice(broken), rng.choice(ids), next(words)) for _ in range(rng.randint(1, 3))]
            more = {"reasoning_content": "thought"} if rng.random() < 0.3 else {}
            messages.append(_say("assistant", text or rng.choice([None, "", "\n"]), tool_calls=calls, **more))
            results = [_say("tool", next(words), tool_call_id=call.get("id") or "") for call in calls]
            messages += results[: rng.randint(0, 3)]
        else:
            messages.append(_say(role, text))
    return messages


def texts_of(messages: list[dict[str, Any]], *, with_arguments: bool = True) -> list[str]:
    """Return the texts that a rendering must hold. with_arguments: also those of arguments that are no object."""
    texts = []
    for message in messages:
        texts.append((message["content"] or "").split("\n")[0])
        for call in message.get("tool_calls", ()):
            texts.append(call["function"]["name"])
            arguments = call["function"]["arguments"]
            if with_arguments or arguments.startswith('{"a"'):
                texts += [word for word in _WORDS if word in arguments]
    return texts


@pytest.mark.parametrize("writes_tools", [False, True], ids=["by the template", "as text"])
@pytest.mark.parametrize("name", _TEMPLATES)
def test_any_history_is_rendered_whole(name: str, writes_tools: bool) -> None:
    template, rng = _template(name), random.Random(name)
    for _ in range(150):
        messages = random_conversation(rng)
        tools = [TOOL] if (template.knows_tools or writes_tools) and rng.random() < 0.5 else []
        rendered = template.render(messages, tools=tools, writes_tools=writes_tools)
        texts = texts_of(messages, with_arguments=name not in _NEED_OBJECTS or writes_tools)
        texts += tools_as_text(tools).splitlines()[:1] if tools and writes_tools else []
        assert all(text in rendered for text in texts), json.dumps(messages, indent=1)


def test_tools_calls_and_results_are_written_for_a_template_without_them() -> None:
    """Tools follow the client's instructions, and results are in the order of the calls."""
    calls = [_call('{"a": 1}', "a"), _call("", "b", 'x"')]
    results = [_say("tool", "second", tool_call_id="b"), _say("tool", "first", tool_call_id="a")]
    messages = [_S, _U, _say("assistant", "Both.", tool_calls=calls), *results, _U]
    expected = [
        ("system", f"S\n\n{tools_as_text([TOOL])}"),
        ("user", "U"),
        ("assistant", 'Both.\n\n[{"name": "look", "arguments": {"a": 1}}, {"name": "x\\"", "arguments": {}}]'),
        ("user", "Result of look:\nfirst"),
        ("user", 'Result of x":\nsecond'),
        ("user", "U"),
        ("assistant", ""),
    ]
    for name in ("chatml", "hermes_tools"):
        rendered = _template(name).render(messages, tools=[TOOL], writes_tools=True)
        blocks = [tuple(block.split("<|im_end|>")[0].split("\n", 1)) for block in rendered.split("<|im_start|>")[1:]]
        assert blocks == expected
    alone = _template("chatml").render([_U, messages[2], results[0]], writes_tools=True)
    assert 'Result of x":\nsecond' in alone, "the first call has no result"
    asked = _user(f"<<SYS>>\n{tools_as_text([TOOL])}\n<</SYS>>\n\nU")
    assert _template("llama2").render([_U], tools=[TOOL], writes_tools=True) == f"<s>{asked}\n"
    assert f"user\n{tools_as_text([TOOL])}\n\nU<" in _template("gemma").render([_U], tools=[TOOL], writes_tools=True)
    assert json.loads(tools_as_text([TOOL]).splitlines()[1]) == TOOL["function"]
