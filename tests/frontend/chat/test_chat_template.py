"""Chat templates: rendering equal to transformers', and rejections."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from core.types.errors import RequestError, SpecError
from frontend.chat.chat_template import ChatTemplate, find_chat_template
from frontend.chat.template_sandbox import MAX_TEXT_CHARS
from tests.support import serving
from tests.support.tiny_tokenizers import CHATML, write_json

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

# chatml, and templates in the style of the supported families.
TEMPLATES = {**serving.TEMPLATES, "chatml": CHATML}

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "  <b>你好</b> & 'quotes' \n"}],
    [
        {"role": "user", "content": "One", "name": "ann"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTwo"},
        {"role": "user", "content": "{{ bos_token }} {% raw %}"},
    ],
]


def _transformers(model_dir: Path, name: str) -> Any:
    """Return transformers' tokenizer with the named template."""
    from transformers import PreTrainedTokenizerFast

    file = str(model_dir / "tokenizer.json")
    return PreTrainedTokenizerFast(tokenizer_file=file, chat_template=TEMPLATES[name], **SPECIAL_TOKENS)


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["user", "system", "turns"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_like_transformers(byte_level_dir: Path, name: str, messages: list[dict[str, Any]]) -> None:
    theirs = _transformers(byte_level_dir, name)
    ours = ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL_TOKENS)
    if name == "gemma" and messages[0]["role"] == "system":
        messages = [{"role": "user", "content": "\n\n".join(message["content"] for message in messages)}]
    for variables in ({}, {"enable_thinking": False}):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
        assert ours.render(messages, variables=variables) == expected


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Of <a> city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_ARGUMENTS = {"city": "Köln", "days": [1, 2.5], "more": {"a": None}}


def _with_calls(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "Sunny.", "tool_call_id": "abcdefghi"},
        {"role": "tool", "content": "Rain.", "tool_call_id": "abcdefghi"},
    ]


@pytest.mark.parametrize("name", ["hermes_tools", "deepseek_tools"])
def test_calls_and_tools_are_rendered_like_transformers(byte_level_dir: Path, name: str) -> None:
    """Text arguments become objects, as transformers expects, unless the template accepts only text."""
    theirs = _transformers(byte_level_dir, name)
    ours = ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL_TOKENS)
    written = json.dumps(_ARGUMENTS, ensure_ascii=False)
    expected = theirs.apply_chat_template(
        _with_calls(written if name == "deepseek_tools" else _ARGUMENTS),
        tools=[WEATHER],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert ours.knows_tools and "Köln" in expected
    assert ours.render(_with_calls(written), tools=[WEATHER]) == expected


@pytest.mark.parametrize("last", ["Once upon", "Once upon a time ", "  "])
@pytest.mark.parametrize("name", ["chatml", "llama3", "hermes_tools"])
def test_last_message_is_continued_like_transformers(byte_level_dir: Path, name: str, last: str) -> None:
    theirs = _transformers(byte_level_dir, name)
    messages = [{"role": "user", "content": "Tell me."}, {"role": "assistant", "content": last}]
    expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    ours = ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL_TOKENS)
    assert ours.render(messages, is_continued=True, opens_answer=False) == expected


_CALLS_ALONE = {  # a template's handling of missing content, and its rendering
    "it looks into the content": (
        "{% if '</think>' in m.content %}{% endif %}{{ m.content }}|{{ m.tool_calls[0].function.arguments|tojson }}",
        '|{"a": 1}',
    ),
    **{
        expression: ("{{ " + expression + " }}|{{ m.tool_calls[0].function.arguments|tojson }}", '|{"a": 1}')
        for expression in (
            "m.content",
            "m.content.strip()",
            "m['content'] | trim",
            "m.content + bos_token",
            "m.content if m.content is string else m.content[0].text",
        )
    },
    "it asks for none": (
        "{{ '!' + m.tool_calls[0]['function']['arguments'] if m.content is none else m.content }}",
        '!{"a": 1}',
    ),
}


@pytest.mark.parametrize("case", _CALLS_ALONE)
@pytest.mark.parametrize("content", [None, "", "\n"])
def test_message_with_only_calls_is_rendered(case: str, content: str | None) -> None:
    written, expected = _CALLS_ALONE[case]
    called = "{% if m.tool_calls %} {{ m.tool_calls[0].function.name }}: " + written + "{% else %} {{ m.content }}"
    source = "{% for m in messages %}" + called + "{% endif %}{% endfor %}{% if tools %}{% endif %}"
    template = ChatTemplate(source, special_tokens={"bos_token": ""})
    call = f" get_weather: {expected}"
    messages = _with_calls('{"a": 1}')
    messages[1]["content"] = content
    assert template.render(messages) == f" Weather?{call} Sunny.{call} Rain."
    if content is not None:
        assert template.render(messages[:2], is_continued=True).startswith(" Weather? get_weather:")


_NAMES_ROLES = (
    "{% for m in messages %}{% if m.role in ('user', 'system', 'assistant', 'tool') %}"
    "{{ m.role }}:{{ m.content }};{% endif %}{% endfor %}"
)


def test_developer_becomes_system_unless_supported() -> None:
    told = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert ChatTemplate(_NAMES_ROLES, special_tokens={}).render(told) == "system:Be brief.;user:hi;"
    knowing = _NAMES_ROLES.replace("'tool'", "'tool', 'developer'")
    assert ChatTemplate(knowing, special_tokens={}).render(told) == "developer:Be brief.;user:hi;"
    assert told[0]["role"] == "developer", "the caller's own stays as it was"


def test_unsupported_role_is_rejected() -> None:
    told = [{"role": "user", "content": "hi"}, {"role": "function", "content": "72 F"}]
    with pytest.raises(RequestError, match="role 'function' is not supported") as caught:
        ChatTemplate(_NAMES_ROLES, special_tokens={}).render(told)
    assert caught.value.param == "messages[1].role"
    assert "function\n72 F" in ChatTemplate(CHATML, special_tokens={}).render(told)


_BROKEN = ("null", "", " ", '{"cmd": "ls', "[]", "3", '"x"', "ls -l", "{}{}", '{"a": NaN}', '{"a": "\\ud800"}')


@pytest.mark.parametrize("name", ["hermes_tools", "deepseek_tools", "mistral_tools", "coder_tools", "llama31_tools"])
def test_arguments_that_are_not_objects_are_rendered(name: str) -> None:
    """They are given as text, or as an empty object where the template needs one; null is an empty object."""
    template = ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL_TOKENS)
    for arguments in _BROKEN:
        rendered = template.render(_with_calls(arguments))
        assert "get_weather" in rendered
        if arguments.strip() not in ("", "null") and name != "coder_tools":
            assert arguments in rendered or json.dumps(arguments)[1:-1] in rendered
        else:
            assert arguments.strip() in ("", "null") or arguments not in rendered


def test_arguments_over_a_limit_are_rejected_with_their_path() -> None:
    template = ChatTemplate(TEMPLATES["hermes_tools"], special_tokens={})
    for wrong in ("[" * 100_000, json.dumps({"a": [1] * 5000})):
        for paths in ([], ["x", "input[7]", "y", "z"]):
            with pytest.raises(RequestError) as caught:
                template.render(_with_calls(wrong), paths=paths)
            assert caught.value.param == (paths or ["", "messages[1]"])[1] + ".tool_calls[0].function.arguments"


def test_template_without_tools_rejects_them() -> None:
    with pytest.raises(RequestError, match=r"model\.tool_parser to generic") as caught:
        ChatTemplate(CHATML, special_tokens={}).render(CONVERSATIONS[0], tools=[WEATHER])
    assert caught.value.param == "tools"
    for source in ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", "{{ tools|length }}"):
        assert ChatTemplate(source, special_tokens={}).knows_tools


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("f.name + f.description", "look"),
        ("f.parameters|tojson", '{"type": "object", "properties": {}}'),
        ("f|tojson", '{"name": "look"}'),
    ],
)
def test_tool_gets_the_fields_that_the_template_needs(printed: str, expected: str) -> None:
    source = "{% for tool in tools or () %}{% set f = tool.function %}{{ " + printed + " }}{% endfor %}"
    tool = {"type": "function", "function": {"name": "look"}}
    assert ChatTemplate(source, special_tokens={}).render(CONVERSATIONS[0], tools=[tool]) == expected


def rejection(source: str | None, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    template = ChatTemplate(source, special_tokens=SPECIAL_TOKENS)
    with pytest.raises(RequestError) as caught:
        template.render(CONVERSATIONS[0] if messages is None else messages, variables=variables)
    assert caught.value.param == "messages"
    return str(caught.value)


def test_template_rejection_is_passed_on() -> None:
    assert "no, user" in rejection("{{ raise_exception('no, ' + messages[0].role) }}")
    assert "has no attribute" in rejection("{{ messages[0].tool_calls.first }}")
    assert "can only concatenate str" in rejection("{{ 'a' + 1 }}")
    assert "not JSON serializable" in rejection("{{ raise_exception|tojson }}")
    assert "no chat template" in rejection(None)
    assert "must not be empty" in rejection(CHATML, [])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.mro() }}",
        "{{ ''.__class__.x }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ 'x' * 999999999 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{% set ns = namespace(__call__=1) %}",
        "{% set ns = namespace() %}{% set ns.__html__ = 1 %}",
        "{% for i in range(99999) %}{{ ' ' * 1000 }}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_hostile_template_is_rejected(source: str) -> None:
    rejection(source)


LARGE = [
    "{{ '%0200000000d' % 1 }}",
    "{{ '%*d' % (200000000, 1) }}",
    "{{ '%0200000000d'|format(1) }}",
    "{{ '{:0200000000d}'.format(1) }}",
    "{{ '{:{}}'.format(1, 200000000) }}",
    "{{ 'a'|center(200000000) }}",
    "{{ 'a'.ljust(200000000) }}",
    "{{ 'a\n'|indent(200000000) }}",
    "{{ '\t'.expandtabs(200000000) }}",
    "{{ ('a' * 10000000).replace('a', 'b' * 1000) }}",
    "{{ ('a' * 10000000)|replace('a', 'b' * 1000) }}",
    "{{ ('a' * 10000000).join(range(1000)|list) }}",
    "{% set ns = namespace(s='ab') %}{% for i in range(34) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(34) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(34) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
]


@pytest.mark.parametrize("source", LARGE)
def test_oversized_values_are_rejected_before_they_are_built(source: str) -> None:
    tracemalloc.start()
    try:
        rejection(source)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * MAX_TEXT_CHARS


def test_common_template_operations_are_allowed() -> None:
    source = (
        "{{ '%s and %5d' % ('a', 3) }} {{ 'a' ~ 1 ~ none }} {{ ['a', 2]|join(', ') }} {{ 'x'.center(5) }}"
        "{{ 'a\nb'|indent(2) }} {{ '{:>4}'.format(3) }} {{ [1] + [2] }} {{ 'abc'.replace('b', 'xy') }}"
        " {{ 'a b'|replace(' ', '_') }} {{ {'a': 1}|tojson(indent=2)|indent(4) }}"
        " {{ messages|map(attribute='role')|tojson }}"
    )
    template = ChatTemplate(source, special_tokens={})
    assert template.render([{"role": "user", "content": ""}]) == (
        'a and     3 a1None a, 2   x  a\n  b    3 [1, 2] axyc a_b {\n      "a": 1\n    } ["user"]'
    )


def test_client_cannot_replace_the_models_variables() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}{{ tools }}", special_tokens=SPECIAL_TOKENS)
    mine = {"bos_token": "mine", "messages": [], "tools": "mine"}
    assert template.render([{"role": "user", "content": "hi"}], variables=mine) == "<s>hiNone"


def test_messages_are_not_parsed_as_template() -> None:
    template = ChatTemplate("{{ messages[0].content }}", special_tokens={})
    assert template.render([{"role": "user", "content": "{{ 1 + 1 }}"}]) == "{{ 1 + 1 }}"
    long = [{"role": "user", "content": "x" * (MAX_TEXT_CHARS + 1)}]
    assert "exceed" in rejection("{{ messages[0].content }}", long)


@pytest.mark.parametrize("names", [("default", "tool_use"), ("tool_use",), ("other", "tool_use"), ("other",)])
def test_named_template_is_chosen_by_the_tools(names: tuple[str, ...]) -> None:
    """tool_use renders chats with tools or calls. Without a default, the first one renders the others."""
    named = {name: "{{ '" + name + "' }}{% if tools %}{% endif %}{{ messages[0].content }}" for name in names}
    template = ChatTemplate(named, special_tokens={})
    with_tools = "tool_use" if "tool_use" in names else names[0]
    said = [{"role": "user", "content": ":hi"}]
    assert template.knows_tools and with_tools in template.sources and names[0] in template.sources
    assert template.render(said) == f"{names[0]}:hi"
    assert template.render(said, tools=[WEATHER]) == f"{with_tools}:hi"
    assert template.render(_with_calls("{}")).startswith(with_tools)
    assert template.render(said, tools=[WEATHER], writes_tools=True).startswith(f"{names[0]}You can call tools.")


def test_invalid_template_is_a_spec_error() -> None:
    with pytest.raises(SpecError, match="line 2"):
        ChatTemplate("x\n{% if %}", special_tokens={})
    with pytest.raises(SpecError, match="characters"):
        ChatTemplate("x" * 1_000_000, special_tokens={})


def test_template_lookup_order(tmp_path: Path) -> None:
    assert find_chat_template(tmp_path) is None
    write_json(tmp_path / "chat_template.json", {"chat_template": "last"})
    assert find_chat_template(tmp_path) == {"default": "last"}
    named = {"tool_use": "calls", "default": "none"}
    for given in (named, [{"name": name, "template": text} for name, text in named.items()]):
        write_json(tmp_path / "tokenizer_config.json", {"chat_template": given})
        assert find_chat_template(tmp_path) == named
    (tmp_path / "chat_template.jinja").write_text("first")
    assert find_chat_template(tmp_path) == {"default": "first"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("calls")
    assert find_chat_template(tmp_path) == {"default": "first", "tool_use": "calls"}
    (tmp_path / "mine.jinja").write_text("the operator's {{ messages }}")
    assert find_chat_template(tmp_path, str(tmp_path / "mine.jinja")) == {"default": "the operator's {{ messages }}"}
    assert find_chat_template(tmp_path, "{% if true %}{% endif %}") == {"default": "{% if true %}{% endif %}"}
    with pytest.raises(SpecError, match=r"model.chat_template: .*missing.jinja cannot be read"):
        find_chat_template(tmp_path, str(tmp_path / "missing.jinja"))
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(SpecError, match="not readable as JSON"):
        find_chat_template(tmp_path)
