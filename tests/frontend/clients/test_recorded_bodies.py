"""Bodies as coding agents and frameworks send them, over several turns, with templates of many families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.access.access import Access
from frontend.http.app import create_app
from frontend.text.tokenizer import Tokenizer
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.tiny_service import MakeCompletions

_HERE = Path(__file__).parent
_CLIENTS = {path.stem: json.loads(path.read_text()) for path in sorted(_HERE.glob("*.json"))}
_TEMPLATES = {path.stem: path.read_text() for path in sorted((_HERE.parent / "chat" / "templates").glob("*.jinja"))}
_WITH_TOOLS = [name for name in _TEMPLATES if name.endswith("_tools") or name == "channels"]
_THINKS = {"hermes_tools", "mistral_tools"}  # here as models that think, by their own tags


@pytest.mark.parametrize("client", _CLIENTS)
@pytest.mark.parametrize("name", _WITH_TOOLS)
async def test_every_turn_is_answered(
    completions: MakeCompletions, byte_level: Tokenizer, client: str, name: str
) -> None:
    """Nothing of the conversation is lost, and what the model cannot read is named in a header."""
    recorded: Any = _CLIENTS[client]
    template = _TEMPLATES[name] + ("{# </think> <tool_call> #}" if name in _THINKS else "{# <tool_call> #}")
    fake = FakeTokenService(max_context=16384)
    service = completions(fake, chat_template=template, max_context=16384, has_grammars=True)
    app = create_app(service, access=Access.anybody(), is_healthy=lambda: True)
    ignored = set[str]()
    async with serve_http(app) as (host, port), httpx.AsyncClient(base_url=f"http://{host}:{port}") as http:
        for body in recorded["turns"]:
            answer = await http.post(recorded["path"], json=body)
            assert answer.status_code == 200, answer.text
            ignored |= set(answer.headers.get("x-ignored-fields", "").split(", "))
    service.close()
    prompt = byte_level.decode(fake.started[-1].token_ids, skip_special_tokens=False)
    assert all(text in prompt for text in recorded["prompt"]), prompt
    assert not any(text in prompt for text in recorded["hidden"])
    assert set(recorded["ignored"]) <= ignored


async def test_billing_header_does_not_defeat_the_prefix_cache(
    completions: MakeCompletions, byte_level: Tokenizer
) -> None:
    """Claude Code's first line differs in each request; Anthropic's API does not show it to the model either."""
    fake = FakeTokenService(max_context=16384)
    service = completions(fake, chat_template=_TEMPLATES["hermes_tools"], max_context=16384)
    app = create_app(service, access=Access.anybody(), is_healthy=lambda: True)
    said: Any = {"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    line = "x-anthropic-billing-header: cch="
    systems: list[Any] = [
        "Be brief.",
        f"{line}1;\nBe brief.",
        [{"type": "text", "text": f"{line}2;"}, {"type": "text", "text": "Be brief."}],
    ]
    async with serve_http(app) as (host, port), httpx.AsyncClient(base_url=f"http://{host}:{port}") as http:
        for system in systems:
            answer = await http.post("/v1/messages", json={**said, "system": system})
            assert ("x-ignored-fields" in answer.headers) is (system != "Be brief.")
    service.close()
    assert len({one.token_ids for one in fake.started}) == 1
