"""Limits of HTTP bodies, rejected with the field's name, and threads that process large ones."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from core.rpc import inference_pb2 as pb
from frontend.grpc import api
from frontend.http import request_contexts
from frontend.openai.types import ChatBody
from tests.support.serving import USER, Served, serving
from tests.support.tiny_service import MakeCompletions

pytestmark = pytest.mark.asyncio(loop_scope="module")

_CALL = {"function": {"name": "", "arguments": ""}}
_DEFINED = {"type": "function", "function": {"name": "f", "parameters": {"$defs": [1]}}}
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "calls": ("/v1/chat/completions", {"messages": [{"role": "u", "tool_calls": [_CALL] * 500}] * 9}, "messages"),
    "messages": ("/v1/chat/completions", {"messages": USER * 4097}, "messages"),
    "messages to tokenise": ("/tokenize", {"messages": USER * 4097}, "messages"),
    "a choice": ("/v1/completions", {"prompt": "a", "structured_outputs": {"choice": ["xy"] * 4000}},
                 "structured_outputs.choice"),
    "tokens": ("/detokenize", {"tokens": [5] * 257}, "tokens"),
    "definitions": ("/v1/chat/completions", {"messages": USER, "tools": [_DEFINED], "tool_choice": "required"},
                    "tools"),
}  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), WRONG.values(), ids=WRONG)
async def test_body_limits(endpoint: Served, path: str, body: dict[str, Any], param: str) -> None:
    answer = await endpoint.http.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"].startswith(param), error
    assert not endpoint.fake.started


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": ["x" * 9000] * 16, "n": 60, "echo": True}, "echo"),
        ("completions", {"prompt": ["x" * 9000] * 16, "n": 60, "return_token_ids": True}, "return_token_ids"),
        ("completions", {"prompt": [[5] * 9000] * 16, "n": 60, "echo": True}, "echo"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 9000}], "n": 128}, "return_token_ids"),
    ],
    ids=["text", "ids", "text of ids", "a chat"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_repeated_prompts_are_limited(
    completions: MakeCompletions, path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    more = {"return_token_ids": True} if "messages" in body else {}
    async with serving(completions(max_context=2**15)) as served:

        async def ask(**fields: Any) -> httpx.Response:
            asked = {**body, **more, "max_tokens": 1, "stream": stream, **fields}
            return await served.http.post(f"/v1/{path}", json=asked, timeout=60)

        assert (await ask(n=1)).status_code == 200
        answer = await ask()
    if "messages" in body and not stream:  # a whole response has the prompt once
        assert len(answer.json()["prompt_token_ids"]) > 1000 and len(answer.json()["choices"]) == 128
    else:
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param


async def test_large_bodies_are_processed_on_threads(endpoint: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = _record_threads(monkeypatch, (ChatBody, "requests"), (request_contexts, "ignored_header"))
    for content, names in (("x", {"MainThread"}), ("x" * 20_000, {"text"})):
        await endpoint.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
        assert {name.partition("_")[0] for name in threads} == names and len(threads) == 2
        threads.clear()


async def test_large_messages_are_processed_on_threads(
    completions: MakeCompletions, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = _record_threads(monkeypatch, (api, "request_of"), (api, "tokenize_request_of"))
    async with serving(completions(max_context=2**15)) as served:
        for content, names in (("x", {"MainThread"}), ("x" * 20_000, {"text"})):
            chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=content)])
            await served.stub.Tokenize(pb.TokenizeRequest(chat=chat))
            await served.generate(pb.GenerateRequest(chat=chat, sampling=pb.SamplingParams(max_tokens=1)))
            assert {name.partition("_")[0] for name in threads} == names and len(threads) == 2
            threads.clear()


def _record_threads(monkeypatch: pytest.MonkeyPatch, *functions: tuple[Any, str]) -> list[str]:
    """Record the names of the threads that call these functions."""
    threads: list[str] = []

    def recording(function: Any) -> Any:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            threads.append(threading.current_thread().name)
            return function(*args, **kwargs)

        return recorded

    for owner, name in functions:
        monkeypatch.setattr(owner, name, recording(getattr(owner, name)))
    return threads
