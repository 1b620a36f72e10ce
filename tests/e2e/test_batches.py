"""Batches through whole routers, with a real model behind them: the same answers, and none lost with a router."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI
from openai.types import Batch

from core.identity.deployment_secrets import DeploymentSecrets
from core.process.ports import free_port
from frontend.service import RouterService
from tests.e2e.conftest import Checkpoint
from tests.e2e.router_process import router_process
from tests.support.identities import router
from tests.support.local_cluster import local_cluster
from tests.support.waiting import becomes, told

_ENDPOINT: Any = "/v1/completions"


def _line(number: int, *, max_tokens: int) -> dict[str, Any]:
    prompt = [5 + (number + i) % 20 for i in range(40)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {"custom_id": f"line {number}", "method": "POST", "url": _ENDPOINT, "body": body}


async def _sent(client: AsyncOpenAI, lines: list[dict[str, Any]]) -> Batch:
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=_ENDPOINT, completion_window="24h")


async def _completed(client: AsyncOpenAI, batch: Batch, *, at_least: int | None = None) -> Batch:
    """When so many lines are answered, or all."""

    async def found() -> Batch | None:
        now = await client.batches.retrieve(batch.id)
        assert now.status in ("validating", "in_progress", "completed") and now.request_counts, now
        is_so = now.status == "completed" or (at_least is not None and now.request_counts.completed >= at_least)
        return now if is_so else None

    is_so = await told(found)
    assert is_so
    return is_so


async def _answers(client: AsyncOpenAI, batch: Batch) -> list[tuple[str, str]]:
    """Of its output file: custom_id and text, line by line."""
    assert batch.output_file_id and batch.error_file_id is None
    content = (await client.files.content(batch.output_file_id)).text
    lines = [json.loads(line) for line in content.splitlines()]
    return [(line["custom_id"], line["response"]["body"]["choices"][0]["text"]) for line in lines]


@pytest.mark.timeout(180)
async def test_a_batch_says_what_each_of_its_requests_would(checkpoint: Checkpoint, redis_url: str) -> None:
    tree: dict[str, Any] = {
        "model": {"served_name": "tiny", "dtype": "float32"},
        "kv": {"wire_dtype": "raw"},
        "decode": {"max_running": 4},
        "router": {"grpc_port": free_port(), "http_port": free_port()},
    }
    lines = [_line(number, max_tokens=4) for number in range(6)]
    async with local_cluster(checkpoint("llama", max_position_embeddings=256), redis_url, **tree) as cluster:
        identity = cluster.identity(router("router-1"))
        service = await RouterService.open(cluster.spec, credentials=cluster.credentials, identity=identity)
        try:
            await becomes(lambda: all(service.health().values()))
            url = "http://{}:{}/v1".format(*service.http_address)
            async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                done = await _completed(client, await _sent(client, lines))
                answers = dict(await _answers(client, done))
                for line in lines:
                    body = dict(line["body"])
                    more = {"ignore_eos": body.pop("ignore_eos")}
                    own = await client.completions.create(**body, extra_body=more)
                    assert answers.pop(line["custom_id"]) == own.choices[0].text
                assert not answers
        finally:
            await service.close()
        await cluster.idle()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_router_that_is_killed_in_the_middle_costs_no_answer(checkpoint: Checkpoint, redis_url: str) -> None:
    """The one that works on it, whichever that is, twice; and then one that starts anew."""
    tree: dict[str, Any] = {
        "model": {"served_name": "tiny", "dtype": "float32"},
        "kv": {"wire_dtype": "raw"},
        "decode": {"max_running": 4},
        "security": {"tls": "off"},
    }
    lines = [_line(number, max_tokens=60) for number in range(60)]
    async with local_cluster(checkpoint("llama", max_position_embeddings=256), redis_url, **tree) as cluster:
        credentials = DeploymentSecrets(secret=cluster.credentials.secret, index_url=redis_url)
        with ExitStack() as stack:
            batch: Batch | None = None
            for number in range(3):
                process, url = await asyncio.to_thread(
                    stack.enter_context, router_process(cluster.spec, credentials, f"router-{number + 1}")
                )
                async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                    batch = batch or await _sent(client, lines)
                    if number < 2:
                        before = await _completed(client, batch, at_least=15 * (number + 1))
                        assert before.status == "in_progress"
                        process.kill()
                        with pytest.raises(APIError):
                            await client.batches.retrieve(batch.id)
                    else:
                        done = await _completed(client, batch)
                        answers = await _answers(client, done)
            assert [custom_id for custom_id, _ in answers] == [line["custom_id"] for line in lines]
            assert done.request_counts and done.request_counts.model_dump() == {
                "total": 60,
                "completed": 60,
                "failed": 0,
            }
        await cluster.idle()
