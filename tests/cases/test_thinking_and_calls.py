"""Thinking and tool calls in answers, in the forms that model families write them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer

from tests.cases.served import HI, TEMPLATES, Serve, Served, calls_of, function

_HERMES = TEMPLATES["hermes_tools"] + "{# </think> #}"
_OPENED = _HERMES + "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"
_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
_NOW = [("now", {})]


async def test_parameters_have_the_types_of_references(serve: Serve) -> None:
    """vllm-project/vllm#37652, vllm-project/vllm#37831, FlashML-org/FreeToken#435"""
    parameters: dict[str, Any] = {
        "$defs": {"Item": {"type": "object"}, "Text": {"type": "string"}},
        "properties": {
            "item": {"$ref": "#/$defs/Item"},
            "limit": {"allOf": [{"type": "integer"}]},
            "text": {"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]},
            "x": {"enum": [1, 2]},
        },
    }
    expected = {"item": {"a": 1}, "limit": 10, "text": "10", "x": 2}
    written = {"item": '{"a": 1}', "limit": "10", "text": "10", "x": "2"}
    lines = "\n".join(f"<parameter={name}>\n{value}\n</parameter>" for name, value in written.items())
    async with serve(chat_template=TEMPLATES["coder_tools"]) as served:
        served.say(f"<tool_call>\n<function=f>\n{lines}\n</function>\n</tool_call>")
        assert calls_of(await served.chat(tools=[function("f", **parameters)])) == [("f", expected)]


@pytest.mark.parametrize("field", [{"reasoning_effort": "medium"}, {"thinking": {"type": "enabled"}}], ids=str)
async def test_effort_reaches_a_switch_of_another_name_or_is_named(serve: Serve, field: dict[str, Any]) -> None:
    """vllm-project/vllm#53058, sgl-project/sglang#22135, BerriAI/litellm#19787, sgl-project/sglang#9488"""
    for template, prompt, ignored in (
        ("{{ 'T:' ~ thinking }}{# </think> #}", "T:True", ""),
        ("hi", "hi", next(iter(field))),
    ):
        async with serve(chat_template=template) as served:
            answer = await served.post("/v1/chat/completions", messages=HI, max_tokens=1, **field)
            assert (served.prompt, answer.headers.get("x-ignored-fields", "")) == (prompt, ignored)


# name: (template, answer, reasoning, content, calls); of the same names, the streamed answer if it differs
_ANSWERS: dict[str, tuple[str, str, str | None, str | None, list[tuple[str, Any]]]] = {
    "vllm-project/vllm#35687 sgl-project/sglang#25881 vllm-project/vllm#33646": (
        _OPENED, f"I call. {_CALL}", "I call.", None, _NOW
    ),
    "vllm-project/vllm#13125 sgl-project/sglang#4711": (
        _HERMES, "some thoughts</think>\n\nanswer", "some thoughts", "answer", []
    ),
    "vllm-project/vllm#13125 before a call": (_HERMES, f"some thoughts</think>{_CALL}", "some thoughts", None, _NOW),
}  # fmt: skip


@pytest.mark.parametrize("case", _ANSWERS)
async def test_thinking_is_separated_without_both_tags(serve: Serve, case: str) -> None:
    template, text, *expected = _ANSWERS[case]
    async with serve(chat_template=template) as served:
        served.say(text)
        found = await served.chat(tools=[function("now")])
        assert [found.get("reasoning_content"), found["content"], calls_of(found)] == expected
        if template == _OPENED:
            assert await _streamed(served) == [expected[0], expected[1] or "", expected[2]]


async def _streamed(served: Served) -> list[Any]:
    answer = await served.post("/v1/chat/completions", messages=HI, tools=[function("now")], stream=True)
    reasoning, content, calls = "", "", dict[int, dict[str, Any]]()
    for event in answer.text.split("\n\n")[:-2]:
        delta = json.loads(event[6:])["choices"][0]["delta"]
        reasoning += delta.get("reasoning_content") or ""
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            told = calls.setdefault(call["index"], {"name": call["function"].get("name"), "arguments": ""})
            told["arguments"] += call["function"].get("arguments", "")
    return [reasoning, content, [(call["name"], json.loads(call["arguments"])) for call in calls.values()]]


async def test_unopened_thinking_is_streamed_as_reasoning_if_the_operator_says_so(serve: Serve) -> None:
    """raullenchai/Rapid-MLX#1570"""
    async with serve(chat_template=_HERMES, tool_parser="hermes", reasoning_parser="deepseek_r1") as served:
        served.say("thoughts</think>answer")
        assert await _streamed(served) == ["thoughts", "answer", []]


async def test_tags_that_are_special_tokens_are_found(serve: Serve, byte_level_dir: Path, tmp_path: Path) -> None:
    """vllm-project/vllm#45359, waybarrios/vllm-mlx#599, LostRuins/koboldcpp#1745: Magistral and Ministral"""
    directory = Path(shutil.copytree(byte_level_dir, tmp_path / "model"))
    fast = FastTokenizer.from_file(str(directory / "tokenizer.json"))
    fast.add_special_tokens(["[THINK]", "[/THINK]"])
    fast.save(str(directory / "tokenizer.json"))
    async with serve(model_dir=directory) as served:
        served.say("[THINK]my reasons[/THINK]answer")
        message = await served.chat()
    assert (message["reasoning_content"], message["content"]) == ("my reasons", "answer")
