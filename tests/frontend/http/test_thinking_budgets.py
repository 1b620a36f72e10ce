"""Thinking budgets in every API, up to the request sent to replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest

from core.rpc import inference_pb2 as pb
from core.rpc.inference_pb2_grpc import InferenceStub
from frontend.access.access import Access
from frontend.grpc.api import open_grpc_api
from frontend.http.app import create_app
from frontend.text.tokenizer import Tokenizer
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.openai_door import USER
from tests.support.plain_http import http_client
from tests.support.tiny_service import MakeCompletions

_THINKS = "{{ '<|im_start|>assistant\\n<think>\\n' }}{# </think> #}"
_CHAT, _TEXT, _RESPONSES, _MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
_BODIES: dict[str, dict[str, Any]] = {
    _CHAT: {"messages": USER, "max_tokens": 4},
    _TEXT: {"prompt": "Hm. <think>"},
    _RESPONSES: {"input": "hi", "max_output_tokens": 4, "store": False},
    _MESSAGES: {"messages": USER, "max_tokens": 4},
}


@dataclass
class Endpoints:
    fake: FakeTokenService
    http: httpx.AsyncClient
    stub: InferenceStub

    async def told(self, path: str, asked: dict[str, Any]) -> tuple[int, bool] | None:
        """Return the token limit and whether thinking was open in the last request to a replica."""
        answer = await self.http.post(path, json={**_BODIES[path], **asked})
        assert answer.status_code == 200, answer.text
        assert "x-ignored-fields" not in answer.headers
        return self.last

    @property
    def last(self) -> tuple[int, bool] | None:
        budget = self.fake.started[-1].thinking
        return None if budget is None else (budget.num_tokens, budget.is_open)

    async def rejected(self, path: str, asked: dict[str, Any]) -> str:
        answer = await self.http.post(path, json={**_BODIES[path], **asked})
        assert answer.status_code == 400 and not self.fake.started
        return str(answer.json()["error"]["message"])


@asynccontextmanager
async def _endpoints(
    completions: MakeCompletions, template: str = _THINKS, *, has_grammars: bool = True
) -> AsyncIterator[Endpoints]:
    fake = FakeTokenService()
    service = completions(fake, chat_template=template, has_grammars=has_grammars)
    endpoint = await open_grpc_api(service, access=Access.anybody(), host="127.0.0.1", port=0)
    app = create_app(service, access=Access.anybody(), is_healthy=lambda: True)
    async with (
        serve_http(app) as (host, port),
        http_client(base_url=f"http://{host}:{port}") as http,
        grpc.aio.insecure_channel(f"127.0.0.1:{endpoint.port}") as channel,
    ):
        yield Endpoints(fake, http, InferenceStub(channel))
    await endpoint.close(grace_s=0)
    service.close()


async def test_every_api_accepts_a_budget(completions: MakeCompletions) -> None:
    async with _endpoints(completions) as endpoints:
        for path in (_CHAT, _TEXT, _RESPONSES):
            assert await endpoints.told(path, {"thinking_token_budget": 7}) == (7, True)
            assert await endpoints.told(path, {}) is None
        assert await endpoints.told(_CHAT, {"thinking_budget": 0}) == (0, True)
        assert await endpoints.told(_CHAT, {"thinking_budget": 3, "thinking_token_budget": 3}) == (3, True)
        assert await endpoints.told(_TEXT, {"prompt": "Hm.", "thinking_token_budget": 2}) == (2, False)
        for kind in ("enabled", "adaptive"):
            assert await endpoints.told(_MESSAGES, {"thinking": {"type": kind, "budget_tokens": 1024}}) == (1024, True)
            assert await endpoints.told(_MESSAGES, {"thinking": {"type": kind}}) is None
        asked = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")]))
        asked.sampling.max_tokens = 4
        for budget in (0, 9):
            asked.sampling.thinking_token_budget = budget
            assert [response async for response in endpoints.stub.Generate(asked)] and endpoints.last == (budget, True)


async def test_unsupported_budget_is_rejected_by_name(completions: MakeCompletions) -> None:
    def enabled(budget: int) -> dict[str, Any]:
        return {"thinking": {"type": "enabled", "budget_tokens": budget}}

    async with _endpoints(completions) as endpoints:
        assert (await endpoints.rejected(_CHAT, {"thinking_token_budget": -1})).startswith(
            "thinking_token_budget: must be"
        )
        assert (await endpoints.rejected(_CHAT, {"thinking_budget": -1})).startswith("thinking_budget: must be from 0")
        assert "conflicts" in await endpoints.rejected(_TEXT, {"thinking_budget": 2, "thinking_token_budget": 3})
        assert (await endpoints.rejected(_MESSAGES, enabled(-1))).startswith("thinking.budget_tokens: must be from 0")
    async with _endpoints(completions, "{{ 'E:' ~ reasoning_effort }}") as endpoints:
        for path in (_CHAT, _TEXT, _RESPONSES):
            message = await endpoints.rejected(path, {"thinking_token_budget": 4})
            assert message.startswith("thinking_token_budget: not supported; this model does not think")
        with pytest.raises(
            grpc.aio.AioRpcError, match="thinking_token_budget: not supported; this model does not think"
        ) as rejected:
            sampling = pb.SamplingParams(thinking_token_budget=4)
            async for _ in endpoints.stub.Generate(pb.GenerateRequest(prompt="a", sampling=sampling)):
                pass
        assert rejected.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    async with _endpoints(completions, has_grammars=False) as endpoints:  # a tokenizer that replicas cannot compile
        assert "is not supported" in await endpoints.rejected(_CHAT, {"thinking_token_budget": 4})


async def test_thinking_tokens_are_counted_up_to_the_closing_marker(
    completions: MakeCompletions, byte_level: Tokenizer
) -> None:
    thought, end = (byte_level.encode(text, add_special_tokens=False) for text in ("Hm, so", "</think>"))
    async with _endpoints(completions) as endpoints:
        said = [*thought, *end, *byte_level.encode("Yes.<|im_end|>", add_special_tokens=False)]
        endpoints.fake.script = lambda *_: said
        body = {"messages": USER, "thinking_token_budget": len(thought)}
        usage = (await endpoints.http.post(_CHAT, json=body)).json()["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == len(thought) + len(end)
