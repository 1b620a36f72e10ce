"""Tenant isolation: two tenants with the same prompt neither share cached prefixes nor see each other's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from openai import BadRequestError

from core.identity.deployment_secrets import Purpose
from core.index.key_channel import KeyPublisher
from core.index.redis_client import connect_redis
from core.rpc import inference_pb2 as pb
from core.rpc import inference_pb2_grpc as rpc
from core.types.request import Role
from tests.e2e.conftest import Lab, exact_tree
from tests.frontend.access.keys import IssuedKey, book_of, issue
from tests.support.local_cluster import LocalReplica
from tests.support.router_service import http_url, router_service
from tests.support.sdk_clients import openai_client
from tests.support.waiting import becomes

_PROMPT = [5 + i % 20 for i in range(100)]  # six full blocks


class Asked:
    """Client for both endpoints of a router with API keys."""

    def __init__(self, decode: LocalReplica, url: str, stub: rpc.InferenceStub) -> None:
        self._decode = decode
        self._url = url
        self._stub = stub

    async def over_http(self, issued: IssuedKey, *, cache_salt: str = "", user: str = "") -> int:
        """Return the reported number of cached prompt tokens."""
        async with openai_client(base_url=f"{self._url}/v1", api_key=issued.secret) as client:
            answer = await client.completions.create(
                model="tiny", prompt=_PROMPT, max_tokens=2, user=user, extra_body={"cache_salt": cache_salt}
            )
        assert answer.usage and answer.usage.prompt_tokens_details
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    def num_running(self) -> int:
        """Number of requests running on the decode replica."""
        return int(self._decode.ranks[0].status()["running"])

    async def text(self, issued: IssuedKey, *, n: int, num_tokens: int) -> None:
        async with openai_client(base_url=f"{self._url}/v1", api_key=issued.secret) as client:
            await client.completions.create(
                model="tiny", prompt=_PROMPT, n=n, max_tokens=num_tokens, extra_body={"ignore_eos": True}
            )

    async def over_grpc(self, issued: IssuedKey, *, cache_salt: str = "") -> int:
        asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=_PROMPT), cache_salt=cache_salt)
        asked.sampling.max_tokens = 2
        metadata = (("authorization", issued.header),)
        events = [event async for event in self._stub.Generate(asked, metadata=metadata, timeout=60)]
        return events[-1].summary.usage.cached_tokens


@asynccontextmanager
async def router_with(lab: Lab, *issued: IssuedKey, max_context: int = 128, **more: Any) -> AsyncIterator[Asked]:
    """Start a router that demands keys. max_context: limit of the model. more: sections of the spec."""
    tree = exact_tree(1, 1, keys="required", max_local_prefill=512) | more
    async with lab.own(lab.checkpoint("llama", max_position_embeddings=max_context), **tree) as cluster:
        signing_key = cluster.credentials.key(Purpose.API_KEYS)
        redis = connect_redis(cluster.credentials.index_url)
        publisher = KeyPublisher(redis, name=cluster.spec.name, signing_key=signing_key)
        await publisher.publish(book_of(*issued))
        async with (
            router_service(cluster, model={"served_name": "tiny"}) as service,
            grpc.aio.insecure_channel(f"127.0.0.1:{service.grpc_port}") as channel,
        ):
            yield Asked(cluster.pools[Role.DECODE][0], http_url(service), rpc.InferenceStub(channel))
        await publisher.close()


@pytest.mark.timeout(180)
async def test_cached_prefixes_are_not_shared_across_tenants(lab: Lab) -> None:
    one, its_twin, other = issue("one", tenant="team"), issue("twin", tenant="team"), issue("other")
    async with router_with(lab, one, its_twin, other) as asked:
        assert await asked.over_http(one) == 0
        assert await asked.over_http(one) > 0, "it finds its own"
        assert await asked.over_grpc(its_twin) > 0, "so does another key of its tenant, at the other endpoint"
        for ask in (asked.over_http, asked.over_grpc):
            salt = "s" if ask == asked.over_http else "t"
            assert await ask(one, cache_salt=salt) == 0
        # Client-chosen fields must not select another tenant's prefix.
        assert await asked.over_http(other, user="team") == 0
        assert await asked.over_grpc(other, cache_salt="team") == 0
        assert await asked.over_http(other, cache_salt="s") == 0


@pytest.mark.timeout(180)
async def test_saturating_tenant_does_not_delay_others(lab: Lab) -> None:
    greedy, modest = issue("greedy"), issue("modest")
    more = {"decode": {"max_running": 4}, "timeouts": {"queue_s": 120}}
    async with router_with(lab, greedy, modest, max_context=4096, **more) as asked:
        with pytest.raises(BadRequestError, match="at most 3 choices of one tenant") as rejected:
            await asked.text(greedy, n=4, num_tokens=2)
        assert rejected.value.param == "n"
        flood = [asyncio.create_task(asked.text(greedy, n=n, num_tokens=3000)) for n in (3, 1, 3)]
        await becomes(asked.num_running)
        for _ in range(3):
            await asked.text(modest, n=1, num_tokens=2)
        assert not any(task.done() for task in flood)
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
