"""Batched tokens are sent together, with the same content as one by one, at both endpoints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from core.rpc import inference_pb2 as pb
from tests.support.fake_token_service import FakeTokenService
from tests.support.serving import Serve, Served

_ASKED = {"prompt": "abc", "max_tokens": 7, "logprobs": 1, "return_token_ids": True}


async def _chunks(served: Served, *, together: int, **more: Any) -> list[dict[str, Any]]:
    """Return the pieces of the one choice, without the final one."""
    served.fake.together = together
    body = _ASKED | {"stream": True, "stream_options": {"include_usage": True}} | more
    answer = await served.http.post("/v1/completions", json=body)
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    *chunks, end, usage = [json.loads(event.removeprefix("data: ")) for event in events]
    texts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0].get("token_ids")]
    assert usage["usage"]["completion_tokens"] == sum(len(text["token_ids"]) for text in texts)
    assert end["choices"][0]["finish_reason"]
    return texts


def _joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    logprobs = {key: [one for chunk in chunks for one in chunk["logprobs"][key]] for key in chunks[0]["logprobs"]}
    token_ids = [id for chunk in chunks for id in chunk["token_ids"]]
    return {"text": "".join(chunk["text"] for chunk in chunks), "token_ids": token_ids, "logprobs": logprobs}


@pytest.mark.parametrize("more", [{}, {"stop": "ca"}], ids=["to its length", "to a stop string"])
async def test_http_sends_batched_tokens_together(serve: Serve, more: dict[str, Any]) -> None:
    """A stop string in the middle of a batch discards the tokens after it."""
    served = await serve()
    alone = await _chunks(served, together=1, **more)
    together = await _chunks(served, together=3, **more)
    assert _joined(together) == _joined(alone)
    sizes = [len(chunk["token_ids"]) for chunk in together]
    assert sizes == ([3, 1] if more else [3, 3, 1]) and len(alone) == sum(sizes)


async def test_grpc_sends_batched_tokens_together(serve: Serve) -> None:
    served = await serve(token_service=FakeTokenService(together=3))
    events = await served.generate(
        pb.GenerateRequest(prompt="abc", sampling=pb.SamplingParams(max_tokens=7, logprobs=1))
    )
    deltas = [event.delta for event in events if event.HasField("delta")]
    assert [delta.text for delta in deltas] == ["abc", "abc", "a"]
    assert all(list(delta.token_ids) == [one.token_id for one in delta.logprobs] for delta in deltas)
    assert events[-1].summary.usage.completion_tokens == 7
