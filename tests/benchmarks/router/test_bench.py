"""Clients and measurement of `python -m benchmarks router`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.router.clients import TimedStream, open_grpc, open_http
from benchmarks.router.run import RouterLoad, bench_router
from frontend.access.access import Access
from frontend.grpc.api import open_grpc_api
from frontend.http.app import create_app
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.tiny_service import MakeCompletions
from tests.support.tiny_tokenizers import make_byte_level

_PROMPTS = [[70, 71, number] for number in range(65, 70)]
_NUM_TOKENS = 4


async def _check(fake: FakeTokenService, streams: list[TimedStream]) -> None:
    """Check that each stream begins, and ends after all its tokens."""
    await asyncio.wait_for(fake.is_hanging.wait(), 30)
    assert not any(stream.ended.done() for stream in streams)
    fake.go_on.set()
    await asyncio.wait_for(asyncio.gather(*(future for one in streams for future in (one.begun, one.ended))), 30)
    assert sorted(list(request.token_ids) for request in fake.started) == _PROMPTS
    assert all(request.sampling.max_tokens == _NUM_TOKENS for request in fake.started)
    assert all(stream.gaps_s and min(stream.gaps_s) >= 0 for stream in streams)


async def test_http_clients_receive_answers(completions: MakeCompletions) -> None:
    fake = FakeTokenService(hang_after=1)
    app = create_app(completions(fake), access=Access.anybody(), is_healthy=lambda: True)
    async with serve_http(app) as (_, port):
        await _check(fake, await open_http(port, _PROMPTS, num_tokens=_NUM_TOKENS))


async def test_grpc_clients_receive_answers(completions: MakeCompletions) -> None:
    fake = FakeTokenService(hang_after=1)
    endpoint = await open_grpc_api(completions(fake), access=Access.anybody(), host="127.0.0.1", port=0)
    await _check(fake, await open_grpc(endpoint.port, _PROMPTS, num_tokens=_NUM_TOKENS, per_connection=2))
    await endpoint.close(grace_s=0)


async def test_cut_off_client_reports_an_error(completions: MakeCompletions) -> None:
    fake = FakeTokenService(fail_after=(2, ZeroDivisionError()))
    app = create_app(completions(fake), access=Access.anybody(), is_healthy=lambda: True)
    async with serve_http(app) as (_, port):
        (stream,) = await open_http(port, _PROMPTS[:1], num_tokens=_NUM_TOKENS)
        with pytest.raises(ConnectionError, match="an answer ended with"):
            await asyncio.wait_for(stream.ended, 30)


@pytest.mark.slow
def test_complete_benchmark(tmp_path: Path) -> None:
    load = RouterLoad(
        requests=4, tokens=6, at_once=2, step_s=0.005, rounds=1, streams=(300,), rate=3000, seconds=0.5, prompt=2000
    )
    found = bench_router(make_byte_level(tmp_path), load)
    assert [(row["endpoint"], row["streams"]) for row in found["streams"]] == [("http", 300), ("grpc", 300)]
    assert found["costs"].keys() == {"http", "grpc"} and all(row["processor_ms"] > 0 for row in found["prompts"])
    for row in found["streams"]:
        assert row["tokens_per_s"] > 0 and row["beyond_pace_ms"]["p50"] <= row["beyond_pace_ms"]["max"]
