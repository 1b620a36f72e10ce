"""Thinking budgets in every API, up to the request sent to replicas."""

from __future__ import annotations

from typing import Any

import grpc

from core.rpc import inference_pb2 as pb
from frontend.text.tokenizer import Tokenizer
from tests.support.serving import USER, Serve, Served

_THINKS = "{{ '<|im_start|>assistant\\n<think>\\n' }}{# </think> #}"
_CHAT, _TEXT, _RESPONSES, _MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
_BODIES: dict[str, dict[str, Any]] = {
    _CHAT: {"messages": USER, "max_tokens": 4},
    _TEXT: {"prompt": "Hm. <think>"},
    _RESPONSES: {"input": "hi", "max_output_tokens": 4, "store": False},
    _MESSAGES: {"messages": USER, "max_tokens": 4},
}


async def _served(serve: Serve, template: str = _THINKS, *, has_grammars: bool = True) -> Served:
    return await serve(chat_template=template, has_grammars=has_grammars)


async def _told(served: Served, path: str, asked: dict[str, Any]) -> tuple[int, bool] | None:
    """Return the token limit and whether thinking was open in the request to a replica."""
    answer = await served.http.post(path, json={**_BODIES[path], **asked})
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in answer.headers
    return _last(served)


def _last(served: Served) -> tuple[int, bool] | None:
    budget = served.fake.started[-1].thinking
    return None if budget is None else (budget.num_tokens, budget.is_open)


async def _message(served: Served, path: str, asked: dict[str, Any]) -> str:
    """Return the message of an error."""
    answer = await served.http.post(path, json={**_BODIES[path], **asked})
    assert answer.status_code == 400 and not served.fake.started
    return str(answer.json()["error"]["message"])


async def test_every_api_accepts_a_budget(serve: Serve) -> None:
    served = await _served(serve)
    for path in (_CHAT, _TEXT, _RESPONSES):
        assert await _told(served, path, {"thinking_token_budget": 7}) == (7, True)
        assert await _told(served, path, {}) is None
    assert await _told(served, _CHAT, {"thinking_budget": 0}) == (0, True)
    assert await _told(served, _CHAT, {"thinking_budget": 3, "thinking_token_budget": 3}) == (3, True)
    assert await _told(served, _TEXT, {"prompt": "Hm.", "thinking_token_budget": 2}) == (2, False)
    for kind in ("enabled", "adaptive"):
        assert await _told(served, _MESSAGES, {"thinking": {"type": kind, "budget_tokens": 1024}}) == (1024, True)
        assert await _told(served, _MESSAGES, {"thinking": {"type": kind}}) is None
    asked = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")]))
    asked.sampling.max_tokens = 4
    for budget in (0, 9):
        asked.sampling.thinking_token_budget = budget
        assert await served.generate(asked) and _last(served) == (budget, True)


async def test_unsupported_budget_is_rejected_by_name(serve: Serve) -> None:
    def enabled(budget: int) -> dict[str, Any]:
        return {"thinking": {"type": "enabled", "budget_tokens": budget}}

    served = await _served(serve)
    for name in ("thinking_token_budget", "thinking_budget"):
        assert (await _message(served, _CHAT, {name: -1})).startswith(f"{name}: must be from 0")
    assert "conflicts" in await _message(served, _TEXT, {"thinking_budget": 2, "thinking_token_budget": 3})
    assert (await _message(served, _MESSAGES, enabled(-1))).startswith("thinking.budget_tokens: must be from 0")
    served = await _served(serve, "{{ 'E:' ~ reasoning_effort }}")
    for path in (_CHAT, _TEXT, _RESPONSES):
        message = await _message(served, path, {"thinking_token_budget": 4})
        assert message.startswith("thinking_token_budget: not supported; this model does not think")
    rejected = await served.rejected(
        pb.GenerateRequest(prompt="a", sampling=pb.SamplingParams(thinking_token_budget=4))
    )
    assert rejected.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "thinking_token_budget: not supported; this model does not think" in rejected.text
    served = await _served(serve, has_grammars=False)
    assert "is not supported" in await _message(served, _CHAT, {"thinking_token_budget": 4})


async def test_thinking_tokens_are_counted_up_to_the_closing_marker(serve: Serve, byte_level: Tokenizer) -> None:
    thought, end = (byte_level.encode(text, add_special_tokens=False) for text in ("Hm, so", "</think>"))
    served = await _served(serve)
    said = [*thought, *end, *byte_level.encode("Yes.<|im_end|>", add_special_tokens=False)]
    served.fake.script = lambda *_: said
    body = {"messages": USER, "thinking_token_budget": len(thought)}
    usage = (await served.http.post(_CHAT, json=body)).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(thought) + len(end)
