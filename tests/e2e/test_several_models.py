"""Second model on one router: an attached deployment joins, serves, fails and leaves while the first one streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import openai
import pytest
from openai import AsyncOpenAI

from core.rpc import inference_pb2 as pb
from core.rpc import inference_pb2_grpc as rpc
from core.types.request import Sampling
from frontend.attached_deployments import AttachedDeployment
from frontend.served_model import RouterMembership
from tests.e2e.conftest import Lab, exact_tree
from tests.engine.steps import prompts
from tests.support.identities import router
from tests.support.local_cluster import LocalCluster
from tests.support.router_service import http_url, router_service
from tests.support.sdk_clients import openai_client
from tests.support.waiting import becomes, told

_NUM_TOKENS = 10
_GREEDY = Sampling(max_tokens=_NUM_TOKENS, temperature=0.0)
_ASKED = prompts(5, 47)


def tree_of(model: str, *, name: str = "cluster", **router: Any) -> dict[str, Any]:
    tree = exact_tree(1, 1, **router) | {"name": name, "timeouts": {"queue_s": 0.5}}
    tree["model"]["served_name"] = model
    return tree


@pytest.mark.timeout(180)
async def test_second_model_joins_serves_fails_and_leaves_while_the_first_streams(lab: Lab) -> None:
    dirs = {"first": lab.checkpoint("llama"), "second": lab.checkpoint("qwen3")}
    expected = {name: lab.reference.ids(model_dir, _ASKED, _GREEDY) for name, model_dir in dirs.items()}
    assert expected["first"] != expected["second"]
    attached_deployments = list[AttachedDeployment]()

    async def find_attached() -> list[AttachedDeployment]:
        return [*attached_deployments]

    async with lab.own(dirs["first"], **tree_of("first")) as cluster:
        async with router_service(cluster, find_attached=find_attached) as service:
            async with openai_client(base_url=f"{http_url(service)}/v1", api_key="none") as client:
                async with streams(client, expected["first"][1]):
                    beside = tree_of("second", name="beside", endpoints="cluster")
                    async with lab.own(dirs["second"], is_alone=False, **beside) as second:
                        attached_deployments.append(attached(second))
                        await becomes(lambda: service.served.names == ["first", "second"])
                        assert [model.id async for model in client.models.list()] == ["first", "second"]
                        for model, ids in expected.items():
                            assert [await ids_of(client, model, prompt) for prompt in _ASKED] == ids
                            assert [await ids_by_grpc(service.grpc_port, model, prompt) for prompt in _ASKED] == ids
                        await second.idle()
                    await told(lambda: is_unavailable(client))
                    assert service.is_ready(), "for the other model"
                    assert await ids_of(client, "first", _ASKED[0]) == expected["first"][0]
                    attached_deployments.clear()
                    await becomes(lambda: service.served.names == ["first"])
                    with pytest.raises(openai.NotFoundError, match="model 'second' is not served here; 'first' is"):
                        await ids_of(client, "second", _ASKED[0])


def attached(cluster: LocalCluster) -> AttachedDeployment:
    async def enter() -> RouterMembership:
        return RouterMembership(identity=cluster.identity(router("router-1", deployment=cluster.spec.name)))

    return AttachedDeployment(spec=cluster.spec, credentials=cluster.credentials, enter=enter)


@asynccontextmanager
async def streams(client: AsyncOpenAI, expected: list[int]) -> AsyncIterator[None]:
    """Stream answers of the first model repeatedly while the block runs. Asserts that all are as expected."""
    is_over = asyncio.Event()

    async def ask() -> int:
        number = 0
        while not is_over.is_set():
            ids = list[int]()
            stream = await client.completions.create(
                model="first",
                prompt=_ASKED[1],
                temperature=0,
                max_tokens=_NUM_TOKENS,
                stream=True,
                extra_body={"return_token_ids": True},
            )
            async for part in stream:
                for choice in part.choices:
                    ids += choice.model_dump().get("token_ids") or []
            assert ids == expected
            number += 1
        return number

    asking = asyncio.create_task(ask())
    try:
        yield
    finally:
        is_over.set()
        assert await asking > 1


async def ids_of(client: AsyncOpenAI, model: str, prompt: list[int]) -> list[int]:
    asked = {"return_token_ids": True}
    answer = await client.completions.create(
        model=model, prompt=prompt, temperature=0, max_tokens=_NUM_TOKENS, extra_body=asked
    )
    assert answer.model == model
    ids: list[int] = answer.choices[0].model_dump()["token_ids"]
    return ids


async def ids_by_grpc(port: int, model: str, prompt: list[int]) -> list[int]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        sampling = pb.SamplingParams(temperature=0, max_tokens=_NUM_TOKENS)
        asked = pb.GenerateRequest(model=model, token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
        return [
            token_id async for event in rpc.InferenceStub(channel).Generate(asked) for token_id in event.delta.token_ids
        ]


async def is_unavailable(client: AsyncOpenAI) -> bool:
    """Return whether the error is the expected one. Until the router drops the dead replicas it may be another."""
    with pytest.raises(openai.InternalServerError) as rejected:
        await ids_of(client, "second", _ASKED[0])
    assert rejected.value.status_code == 503
    said = rejected.value.body["message"]  # type: ignore[index]
    return said == "model 'second' cannot be served at present: it has no decode replica"
