"""A served model on a fake token service: the test sets its answer, and reads the prompt that reached it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from frontend.text.completion import Completions
from frontend.text.tokenizer import Tokenizer
from tests.support.fake_token_service import FakeTokenService

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
TEMPLATES = {
    path.stem: path.read_text()
    for path in (Path(__file__).parent.parent / "frontend" / "chat" / "templates").glob("*.jinja")
}


@dataclass(frozen=True)
class Served:
    service: Completions
    fake: FakeTokenService
    tokenizer: Tokenizer
    http: httpx.AsyncClient

    def say(self, text: str) -> None:
        """Answer every request with this text."""
        ids = self.tokenizer.encode(f"{text}<|im_end|>")
        self.fake.script = lambda *_: ids

    async def post(self, path: str, **body: Any) -> httpx.Response:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer

    async def chat(self, **body: Any) -> dict[str, Any]:
        """Return the message of a chat."""
        answer = await self.post("/v1/chat/completions", **{"messages": HI} | body)
        return dict(answer.json()["choices"][0]["message"])

    @property
    def prompt(self) -> str:
        """Last prompt, as the model saw it."""
        return self.tokenizer.decode(self.fake.started[-1].token_ids, skip_special_tokens=False)


Serve = Callable[..., AbstractAsyncContextManager[Served]]


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return names and arguments of a message's tool calls."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def function(name: str, **parameters: Any) -> dict[str, Any]:
    """Return a tool of the chat API."""
    return {"type": "function", "function": {"name": name, "parameters": parameters}}
