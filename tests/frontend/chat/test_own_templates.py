"""Our templates of formats that checkpoints describe in other ways: Mistral's tekken.json, and DeepSeek-V3.2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from frontend.chat.chat_template import ChatTemplate, find_chat_template
from frontend.chat.output_format import OutputFormat
from tests.support.tiny_tokenizers import write_json

_LOOK = {"name": "look", "description": "Ä", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
_TOOLS = [{"type": "function", "function": _LOOK}, {"type": "function", "function": {"name": "now"}}]
_SHOWN = json.dumps(_TOOLS, ensure_ascii=False)


def _call(id: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}}


_AGENT: list[dict[str, Any]] = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A", "reasoning_content": "T"},
    {"role": "user", "content": "V"},
    {"role": "assistant", "content": "Look.", "reasoning_content": "R", "tool_calls": [_call("abcdefgh1",
     '{"a": "é\\n", "b": [1, null]}'), _call("abcdefgh2", "{}")]},
    {"role": "tool", "content": "4", "tool_call_id": "abcdefgh1"},
    {"role": "tool", "content": "{}", "tool_call_id": "abcdefgh2"},
]  # fmt: skip
# As mistral-common 1.13 renders them.
_MISTRAL = {
    7: f"<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U[/INST]A</s>[AVAILABLE_TOOLS]{_SHOWN}[/AVAILABLE_TOOLS]"
    '[INST]V[/INST]Look.[TOOL_CALLS][{"name": "look", "arguments": {"a": "é\\n", "b": [1, null]}, "id": "abcdefgh1"}, '
    '{"name": "look", "arguments": {}, "id": "abcdefgh2"}]</s>[TOOL_RESULTS]abcdefgh1[TOOL_CONTENT]4[/TOOL_RESULTS]'
    "[TOOL_RESULTS]abcdefgh2[TOOL_CONTENT]{}[/TOOL_RESULTS]",
    11: f"<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U[/INST]A</s>[AVAILABLE_TOOLS]{_SHOWN}[/AVAILABLE_TOOLS]"
    '[INST]V[/INST]Look.[TOOL_CALLS]look[CALL_ID]abcdefgh1[ARGS]{"a": "é\\n", "b": [1, null]}'
    "[TOOL_CALLS]look[CALL_ID]abcdefgh2[ARGS]{}</s>[TOOL_RESULTS]abcdefgh1[TOOL_CONTENT]4[/TOOL_RESULTS]"
    "[TOOL_RESULTS]abcdefgh2[TOOL_CONTENT]{}[/TOOL_RESULTS]",
    13: f"<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][AVAILABLE_TOOLS]{_SHOWN}[/AVAILABLE_TOOLS][INST]U[/INST][THINK]T[/THINK]A"
    '</s>[INST]V[/INST][THINK]R[/THINK]Look.[TOOL_CALLS]look[ARGS]{"a": "é\\n", "b": [1, null]}'
    "[TOOL_CALLS]look[ARGS]{}</s>[TOOL_RESULTS]4[/TOOL_RESULTS][TOOL_RESULTS]{}[/TOOL_RESULTS]",
}


def _of_tekken(directory: Path, version: str, *, thinks: bool) -> ChatTemplate:
    names = ["<unk>", "<s>", "</s>", *(["[THINK]", "[/THINK]"] if thinks else [])]
    special = [{"rank": number, "token_str": text, "is_control": True} for number, text in enumerate(names)]
    config = {"version": version, "default_num_special_tokens": len(names)}
    write_json(directory / "tekken.json", {"config": config, "special_tokens": special})
    return ChatTemplate(find_chat_template(directory), special_tokens={})


@pytest.mark.parametrize("version", _MISTRAL)
def test_mistral_format(version: int, tmp_path: Path) -> None:
    template = _of_tekken(tmp_path, f"v{version}", thinks=version == 13)
    assert template.render(_AGENT, tools=_TOOLS) == _MISTRAL[version]
    of_answers = OutputFormat.of(template.sources)
    assert of_answers.calls == "mistral" and (of_answers.tags is not None) is (version == 13)
    continued = template.render(_AGENT[1:3], is_continued=True, opens_answer=False)
    assert continued.endswith("[INST]U[/INST][THINK]T[/THINK]A" if version == 13 else "[INST]U[/INST]A")
    merged = template.render([_AGENT[1], _AGENT[3]])
    assert merged == "<s>[INST]U\n\nV[/INST]", "as in Mistral's own renderer"
    called = {"role": "assistant", "content": None, "tool_calls": [_call("call_0123456789", "{}")]}
    rendered = template.render([_AGENT[1], called])
    assert "call_0123456789" not in rendered and "look" in rendered, "ids have nine characters, or are left out"


def test_tekken_versions_without_a_template(tmp_path: Path) -> None:
    for version in ("v3", "v15"):
        _of_tekken(tmp_path, "v7", thinks=False)
        tree = json.loads((tmp_path / "tekken.json").read_text())
        write_json(tmp_path / "tekken.json", {**tree, "config": {**tree["config"], "version": version}})
        assert find_chat_template(tmp_path) is None
    (tmp_path / "chat_template.jinja").write_text("own")
    assert find_chat_template(tmp_path) == {"default": "own"}, "the checkpoint's own template comes first"


_V32_CALLS = (
    '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n'  # noqa: RUF001
    '<｜DSML｜parameter name="a" string="true">é\n</｜DSML｜parameter>\n'  # noqa: RUF001
    '<｜DSML｜parameter name="b" string="false">[1, null]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'  # noqa: RUF001
    '<｜DSML｜invoke name="look">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls><｜end▁of▁sentence｜>'  # noqa: RUF001
    "\n\n<function_results>\n<result>4</result>\n<result>{}</result>\n</function_results>\n\n"
)
_V32_HEAD = "<｜begin▁of▁sentence｜>S\n\n## Tools\n\nYou have access to a set of tools you can use "  # noqa: RUF001
_V32_TAIL = f'<functions>\n{json.dumps(_LOOK, ensure_ascii=False)}\n{{"name": "now"}}\n</functions>\n<｜User｜>U'  # noqa: RUF001


@pytest.mark.parametrize("thinks", [False, True])
def test_deepseek_v32_format(thinks: bool, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"architectures": ["DeepseekV32ForCausalLM"]})
    template = ChatTemplate(find_chat_template(tmp_path), special_tokens={})
    rendered = template.render(_AGENT, tools=_TOOLS, variables={"thinking": thinks})
    assert rendered.startswith(_V32_HEAD)
    head, tail, dialogue = rendered.partition(_V32_TAIL)
    assert tail and head.count("<｜DSML｜function_calls>") == 3  # noqa: RUF001
    opened = "<think>R</think>" if thinks else "</think>"
    assert dialogue == (
        f"<｜Assistant｜></think>A<｜end▁of▁sentence｜><｜User｜>V<｜Assistant｜>{opened}Look.{_V32_CALLS}"  # noqa: RUF001
        f"{'<think>' if thinks else '</think>'}"
    ), "thoughts of the current turn are sent back"
    plain = template.render(_AGENT[1:2], variables={"thinking": thinks})
    assert plain == f"<｜begin▁of▁sentence｜><｜User｜>U<｜Assistant｜>{'<think>' if thinks else '</think>'}"  # noqa: RUF001
    assert template.switches == ("thinking",) and OutputFormat.of(template.sources).tags
