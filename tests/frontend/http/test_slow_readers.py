"""Clients that stop reading hold bounded memory for a bounded time, at both endpoints."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from typing import Any

import grpc
import pytest

from core.rpc import inference_pb2 as pb
from core.rpc.inference_pb2_grpc import InferenceStub
from frontend.text.completion import Completions
from tests.support.serving import Serve, Served
from tests.support.waiting import becomes

_LIMIT_S = 0.3


@pytest.fixture
async def served(serve: Serve) -> Served:
    return await serve(max_context=4096, max_unread_s=_LIMIT_S)


def _ended(service: Completions) -> dict[str, float]:
    samples = [sample for family in service.metrics.requests.collect() for sample in family.samples]
    return {
        sample.labels["outcome"]: sample.value
        for sample in samples
        if sample.name == "xpyd_requests_total" and sample.value
    }


def _request(body: dict[str, Any]) -> bytes:
    content = json.dumps({"logprobs": 20, "stream": True, **body}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    return head % len(content) + content


@pytest.mark.parametrize("prompt", ["abc", ["abc", "abc"]], ids=["one prompt", "two prompts"])
async def test_http_client_that_does_not_read_is_cut_off(served: Served, prompt: str | list[str]) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(served.address)
        client.sendall(_request({"prompt": prompt, "n": 64, "max_tokens": 4000}))
        await becomes(lambda: _ended(served.service))
    if isinstance(prompt, str):
        assert _ended(served.service) == {"client_too_slow": 1}
    assert len(served.fake.ended) == len(served.fake.started) and "completed" not in _ended(served.service)
    assert served.fake.num_tokens < 64 * 4000, "it was paused before the end"


async def test_grpc_client_that_does_not_read_is_cut_off_with_a_reason(served: Served) -> None:
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.api.port}", options=options) as channel:
        sampling = pb.SamplingParams(n=64, max_tokens=4000, logprobs=20)
        call = InferenceStub(channel).Generate(pb.GenerateRequest(prompt="abc", sampling=sampling))
        await call.read()
        await asyncio.wait_for(served.fake.has_ended.wait(), 60)
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        assert await call.code() is grpc.StatusCode.ABORTED and "not read for" in await call.details()
    assert _ended(served.service) == {"client_too_slow": 1} and served.fake.num_tokens < 64 * 4000


async def test_slow_reader_is_only_paused(served: Served) -> None:
    reader, writer = await asyncio.open_connection(*served.address, limit=4096)
    writer.write(_request({"prompt": "abc", "n": 16, "max_tokens": 200}))
    whole = bytearray()
    while part := await reader.read(65536):
        whole += part
        await asyncio.sleep(0)
    writer.close()
    assert whole.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and _ended(served.service) == {"completed": 1}
