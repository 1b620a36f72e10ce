"""Clients that stop reading hold bounded memory for a bounded time, at both endpoints."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress

import grpc
import pytest

from core.rpc import inference_pb2 as pb
from core.rpc.inference_pb2_grpc import InferenceStub
from frontend.access.access import Access
from frontend.grpc.api import open_grpc_api
from frontend.http.app import create_app
from frontend.text.completion import Completions
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.tiny_service import MakeCompletions
from tests.support.waiting import becomes

_LIMIT_S = 0.3


def _service(completions: MakeCompletions) -> tuple[Completions, FakeTokenService]:
    fake = FakeTokenService(max_context=4096)
    return completions(fake, max_context=4096, max_unread_s=_LIMIT_S), fake


def _ended(service: Completions) -> dict[str, float]:
    samples = [sample for family in service.metrics.requests.collect() for sample in family.samples]
    return {
        sample.labels["outcome"]: sample.value
        for sample in samples
        if sample.name == "xpyd_requests_total" and sample.value
    }


@pytest.mark.parametrize("prompt", ["abc", ["abc", "abc"]], ids=["one prompt", "two prompts"])
async def test_http_client_that_does_not_read_is_cut_off(completions: MakeCompletions, prompt: str | list[str]) -> None:
    service, fake = _service(completions)
    app = create_app(service, access=Access.anybody(), is_healthy=lambda: True)
    body = json.dumps({"prompt": prompt, "n": 64, "max_tokens": 4000, "logprobs": 20, "stream": True}).encode()
    async with serve_http(app) as address:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(address)
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await becomes(lambda: _ended(service))
    if isinstance(prompt, str):
        assert _ended(service) == {"client_too_slow": 1}
    assert len(fake.ended) == len(fake.started) and "completed" not in _ended(service)
    assert fake.num_tokens < 64 * 4000, "it was paused before the end"
    service.close()


async def test_grpc_client_that_does_not_read_is_cut_off_with_a_reason(completions: MakeCompletions) -> None:
    service, fake = _service(completions)
    endpoint = await open_grpc_api(service, access=Access.anybody(), host="127.0.0.1", port=0)
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{endpoint.port}", options=options) as channel:
        sampling = pb.SamplingParams(n=64, max_tokens=4000, logprobs=20)
        call = InferenceStub(channel).Generate(pb.GenerateRequest(prompt="abc", sampling=sampling))
        await call.read()
        await asyncio.wait_for(fake.has_ended.wait(), 60)
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        assert await call.code() is grpc.StatusCode.ABORTED and "not read for" in await call.details()
    assert _ended(service) == {"client_too_slow": 1} and fake.num_tokens < 64 * 4000
    await endpoint.close(grace_s=0)
    service.close()


async def test_slow_reader_is_only_paused(completions: MakeCompletions) -> None:
    service, _ = _service(completions)
    app = create_app(service, access=Access.anybody(), is_healthy=lambda: True)
    body = json.dumps({"prompt": "abc", "n": 16, "max_tokens": 200, "logprobs": 20, "stream": True}).encode()
    async with serve_http(app) as address:
        reader, writer = await asyncio.open_connection(*address, limit=4096)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n")
        writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
        whole = bytearray()
        while part := await reader.read(65536):
            whole += part
            await asyncio.sleep(0)
        writer.close()
    assert whole.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and _ended(service) == {"completed": 1}
    service.close()
