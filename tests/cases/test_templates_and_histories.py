"""Chat templates of published models, and histories as agents send them back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from frontend.chat.chat_template import find_chat_template
from tests.cases.served import HI, TEMPLATES, Serve, function

_CHAT, _MESSAGES, _RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@pytest.mark.parametrize(("arguments", "shown"), [("null", "{}"), ('{"cmd": "ls', "cmd")])
@pytest.mark.parametrize("path", [_CHAT, _RESPONSES])
async def test_malformed_call_in_the_history_is_rendered(serve: Serve, path: str, arguments: str, shown: str) -> None:
    """vllm-project/vllm#48922, vllm-project/vllm#43851, windmill-labs/windmill#9902, sgl-project/sglang#28035"""
    call = {"name": "run", "arguments": arguments}
    history: dict[str, dict[str, Any]] = {
        _CHAT: {
            "messages": [
                *HI,
                {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": call}]},
                {"role": "tool", "tool_call_id": "a", "content": "FAILED"},
            ]
        },
        _RESPONSES: {
            "input": [
                *HI,
                {"type": "function_call", "call_id": "a", **call},
                {"type": "function_call_output", "call_id": "a", "output": "FAILED"},
            ]
        },
    }
    async with serve(chat_template=TEMPLATES["hermes_tools"]) as served:
        await served.post(path, **history[path])
        assert f'"name": "run", "arguments": {shown}' in served.prompt or f'"arguments": "{{\\"{shown}' in served.prompt
        assert "FAILED" in served.prompt


@pytest.mark.parametrize("place", ["a list", "files"])
async def test_template_for_tools_renders_chats_with_tools(serve: Serve, place: str, tmp_path: Path) -> None:
    """huggingface/transformers#31429, ollama/ollama#6522"""
    texts = {"default": "D {{ messages[0].content }}", "tool_use": "T {{ tools[0].function.name }}{# <tool_call> #}"}
    if place == "a list":
        named = [{"name": name, "template": text} for name, text in texts.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    else:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "chat_template.jinja").write_text(texts["default"])
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(texts["tool_use"])
    async with serve(chat_template=find_chat_template(tmp_path)) as served:
        for tools, prompt in (([], "D hi"), ([function("look")], "T look")):
            await served.chat(tools=tools, max_tokens=1)
            assert served.prompt == prompt


_PARTS_ONLY = (
    "{% for message in messages %}[{{ message.role }}]{% for part in message.content if part.type == 'text' %}"
    "{{ part.text }}{% endfor %}{% endfor %}"
)
_PARTS_OF_USERS = (
    "{% for message in messages %}[{{ message.role }}]"
    "{{ message.content[0]['text'] if message.role == 'user' else message.content }}{% endfor %}"
)


@pytest.mark.parametrize("template", [_PARTS_ONLY, _PARTS_OF_USERS], ids=["all", "users"])
async def test_template_that_reads_parts_only_gets_the_texts(serve: Serve, template: str) -> None:
    """vllm-project/vllm#9358, google-ai-edge/LiteRT-LM#3688: the prompt had none of the conversation's text."""
    said = [{"role": "system", "content": "S"}, *HI, {"role": "assistant", "content": "A"}, *HI]
    async with serve(chat_template=template) as served:
        await served.chat(messages=said, max_tokens=1)
        assert served.prompt == "[system]S[user]hi[assistant]A[user]hi"
        await served.chat(messages=said[:3], max_tokens=1, add_generation_prompt=False, continue_final_message=True)
        assert served.prompt == "[system]S[user]hi[assistant]A"


async def test_strict_template_gets_one_system_message(serve: Serve) -> None:
    """vllm-project/vllm#43590, BerriAI/litellm#39282, ggml-org/llama.cpp#20079, Blaizzy/mlx-vlm#1716"""
    said = [*HI, {"role": "developer", "content": "B"}, {"role": "user", "content": "more"}]
    async with serve(chat_template=TEMPLATES["llama2"]) as served:
        await served.post(_RESPONSES, instructions="A", input=[said[1], *said])
        assert "<<SYS>>\nA\n\nB\n<</SYS>>\n\nhi\n\nB\n\nmore [/INST]" in served.prompt


async def test_image_in_a_tool_result_becomes_a_placeholder(serve: Serve) -> None:
    """ENTERPILOT/GoModel#878, langchain-ai/deepagents#5194"""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
    called = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [image, {"type": "text", "text": "SEEN"}]}
    said = [*HI, {"role": "assistant", "content": [called]}, {"role": "user", "content": [result]}]
    async with serve(chat_template=TEMPLATES["hermes_tools"]) as served:
        await served.post(_MESSAGES, messages=said, max_tokens=1)
        assert "[image omitted: this model reads text only]" in served.prompt and "SEEN" in served.prompt
        refused = await served.http.post(_CHAT, json={"messages": [{"role": "user", "content": [image]}]})
        assert refused.status_code == 400, "an image of the user is the request itself"


async def test_reasoning_is_given_and_taken_under_both_names(serve: Serve) -> None:
    """vllm-project/vllm#27755, vllm-project/router#115, BerriAI/litellm#26501"""
    async with serve(chat_template=TEMPLATES["channels"]) as served:
        served.say("<|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant<|channel|>final<|message|>a")
        answer = await served.chat()
        assert answer["reasoning"] == answer["reasoning_content"] == "THOUGHT"
        called = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", **function("look")}]}
        called["tool_calls"][0]["function"] = {"name": "look", "arguments": "{}"}
        for name in ("reasoning", "reasoning_content"):
            result = {"role": "tool", "tool_call_id": "a", "content": "R"}
            await served.chat(messages=[*HI, {**called, name: "THOUGHT"}, result])
            assert "THOUGHT" in served.prompt


async def test_billing_header_does_not_defeat_the_prefix_cache(serve: Serve) -> None:
    """vllm-project/vllm#36829, sgl-project/sglang#21064, ggml-org/llama.cpp#20623, waybarrios/vllm-mlx#277

    The first line of Claude Code differs in each request; Anthropic's API does not show it to the model either.
    """
    line = "x-anthropic-billing-header: cch="
    systems: list[Any] = [
        "Be brief.",
        f"{line}1;\nBe brief.",
        [{"type": "text", "text": f"{line}2;"}, {"type": "text", "text": "Be brief."}],
    ]
    async with serve(chat_template=TEMPLATES["hermes_tools"]) as served:
        for system in systems:
            answer = await served.post(_MESSAGES, max_tokens=1, messages=HI, system=system)
            assert ("x-ignored-fields" in answer.headers) is (system != "Be brief.")
        assert len({one.token_ids for one in served.fake.started}) == 1
