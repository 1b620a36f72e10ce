"""A second model behind a router's doors: a deployment of its own, which comes, answers, fails and goes while the first
one's streams run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import openai
import pytest
from openai import AsyncOpenAI

from cluster.rpc import inference_pb2 as pb
from cluster.rpc import inference_pb2_grpc as rpc
from cluster.words.request import Sampling
from router.guests import Guest, Pass
from router.service import RouterService
from tests.e2e.conftest import Reference, exact_tree
from tests.engine.steps import prompts
from tests.identities import router
from tests.local_cluster import LocalCluster, local_cluster
from tests.waiting import becomes, told

_GREEDY = Sampling(max_tokens=24, temperature=0.0)


async def check_guest(
    service: RouterService, guests: list[Guest], model_dir: Path, redis_url: str, reference: Reference
) -> None:
    """guests: what the service finds; its own model is "smollm2". model_dir: of the guest, whose answers are those of
    `reference`."""
    url = "http://{}:{}/v1".format(*service.http_address)
    tree = exact_tree(1, 1, doors="cluster") | {"name": "beside", "timeouts": {"queue_s": 0.5}}
    tree["model"]["served_name"] = "tiny"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client, _streams(client):

        async def names() -> list[str]:
            return [model.id async for model in client.models.list()]

        assert await names() == ["smollm2"]
        async with local_cluster(model_dir, redis_url, is_alone=False, **tree) as beside:
            guests.append(_guest(beside))
            await becomes(lambda: service.models == ["smollm2", "tiny"])
            assert await names() == ["smollm2", "tiny"]
            await _check_answers(client, service.grpc_port, model_dir, reference)
            with pytest.raises(
                openai.NotFoundError, match="model 'third' is not served here; 'smollm2' and 'tiny' are"
            ):
                await client.completions.create(model="third", prompt="hi")
            await beside.idle()
        await told(lambda: _is_away(client))
        assert service.is_ready(), "for the other model"
        guests.clear()
        await becomes(lambda: service.models == ["smollm2"])
        with pytest.raises(openai.NotFoundError, match="model 'tiny' is not served here; 'smollm2' is"):
            await client.completions.create(model="tiny", prompt=[1, 2, 3])


def _guest(cluster: LocalCluster) -> Guest:
    async def enter() -> Pass:
        return Pass(identity=cluster.identity(router("router-1", deployment=cluster.spec.name)))

    return Guest(spec=cluster.spec, credentials=cluster.credentials, enter=enter)


@asynccontextmanager
async def _streams(client: AsyncOpenAI) -> AsyncIterator[None]:
    """Streams of the first model, one after the other for as long as the block lasts: none fails, all say the same."""
    is_over = asyncio.Event()

    async def ask() -> int:
        texts = list[str]()
        while not is_over.is_set():
            stream = await client.completions.create(
                model="smollm2", prompt="One, two, three,", temperature=0, max_tokens=24, stream=True
            )
            texts.append("".join([part.choices[0].text async for part in stream if part.choices]))
        assert len(set(texts)) == 1, texts
        return len(texts)

    asking = asyncio.create_task(ask())
    try:
        yield
    except BaseException:
        asking.cancel()
        raise
    finally:
        is_over.set()
        with suppress(asyncio.CancelledError):
            assert await asking


async def _check_answers(client: AsyncOpenAI, grpc_port: int, model_dir: Path, reference: Reference) -> None:
    """At both doors, token for token."""
    asked = prompts(5, 47, 70)
    expected = [[token.token_id for token in tokens] for tokens in reference(model_dir, asked, _GREEDY)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        stub = rpc.InferenceStub(channel)
        for prompt, ids in zip(asked, expected, strict=True):
            answer = await client.completions.create(
                model="tiny", prompt=prompt, temperature=0, max_tokens=24, extra_body={"return_token_ids": True}
            )
            assert answer.choices[0].model_dump()["token_ids"] == ids
            request = pb.GenerateRequest(
                model="tiny",
                token_ids=pb.TokenIds(ids=prompt),
                sampling=pb.SamplingParams(temperature=0, max_tokens=24),
            )
            deltas = [event.delta.token_ids async for event in stub.Generate(request)]
            assert [token_id for some in deltas for token_id in some] == ids


async def _is_away(client: AsyncOpenAI) -> bool:
    """Before its router has seen that the replicas are gone it may try one, in vain."""
    with pytest.raises(openai.InternalServerError) as refused:
        await client.completions.create(model="tiny", prompt=[1, 2, 3])
    assert refused.value.status_code == 503
    said = refused.value.body["message"]  # type: ignore[index]
    return said == "model 'tiny' cannot be served at present: it has no decode replica"
