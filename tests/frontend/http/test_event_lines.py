"""Every event is one line, also for a client that splits lines as Unicode does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.types.errors import ReplicaLost
from frontend.access.access import Access
from frontend.http.app import create_app
from frontend.text.tokenizer import Tokenizer
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.tiny_service import MakeCompletions

_ENDS = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1e"
_TEMPLATE = (Path(__file__).parent.parent / "chat" / "templates" / "hermes_tools.jinja").read_text()
_CALL = "<tool_call>\n" + json.dumps({"name": "f", "arguments": {"x": _ENDS}}, ensure_ascii=False) + "\n</tool_call>"
_THOUGHT = f"<think>{_ENDS}</think>x"
_HI = [{"role": "user", "content": "hi"}]
_SCHEMA: dict[str, Any] = {"type": "object", "description": _ENDS}
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}]
_CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", {"messages": _HI}, _ENDS),
    "chat logprobs": ("/v1/chat/completions", {"messages": _HI, "logprobs": True, "top_logprobs": 2}, _ENDS),
    "chat calls": ("/v1/chat/completions", {"messages": _HI, "tools": _TOOLS}, _CALL),
    "chat thoughts": ("/v1/chat/completions", {"messages": _HI}, _THOUGHT),
    "text": ("/v1/completions", {"prompt": "hi", "max_tokens": 200, "return_token_ids": True}, _ENDS),
    "echo": ("/v1/completions", {"prompt": _ENDS, "max_tokens": 200, "echo": True, "logprobs": 1}, _ENDS),
    "stop": ("/v1/completions", {"prompt": "hi", "max_tokens": 200, "stop": "\u2029z"}, _ENDS),
    "messages": ("/v1/messages", {"messages": _HI, "max_tokens": 200}, _ENDS),
    "messages calls": (
        "/v1/messages",
        {"messages": _HI, "max_tokens": 200, "tools": [{"name": "f", "input_schema": _SCHEMA}]},
        _CALL,
    ),
    "messages thoughts": ("/v1/messages", {"messages": _HI, "max_tokens": 200}, _THOUGHT),
    "responses": ("/v1/responses", {"input": _ENDS, "instructions": _ENDS, "metadata": {"a": _ENDS}}, _ENDS),
    "responses calls": (
        "/v1/responses",
        {"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA}]},
        _CALL,
    ),
    "responses thoughts": ("/v1/responses", {"input": "hi"}, _THOUGHT),
}


@pytest.mark.parametrize("is_failing", [False, True], ids=["", "fails"])
@pytest.mark.parametrize("case", _CASES)
async def test_each_event_is_one_line(
    completions: MakeCompletions, byte_level: Tokenizer, case: str, is_failing: bool
) -> None:
    path, body, text = _CASES[case]
    ids = byte_level.encode(f"{text}<|im_end|>")
    fake = FakeTokenService(script=lambda *_: ids, max_context=4096)
    if is_failing:
        fake.fail_after = (len(ids) - 1, ReplicaLost(_ENDS))
    service = completions(fake, chat_template=_TEMPLATE + "{# <think> </think> #}", max_context=4096)
    app = create_app(service, access=Access.anybody(), is_healthy=lambda: True)
    async with serve_http(app) as address, httpx.AsyncClient(base_url="http://{}:{}".format(*address)) as http:
        async with http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            lines = [line async for line in answer.aiter_lines()]
    service.close()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert {line.partition(": ")[0] for line in lines} <= {"", "data", "event"}
    said = [json.loads(event) for event in events if event != "[DONE]"]
    assert "\u2028" in json.dumps(said, ensure_ascii=False), "the characters themselves arrive"
    assert not any(end in "".join(lines) for end in _ENDS if not end.isalpha())
    if is_failing:
        assert said[-1].get("response", said[-1])["error"]["message"] == _ENDS
