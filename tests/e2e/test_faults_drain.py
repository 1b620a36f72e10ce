"""A draining decode replica migrates its running sequences to another one, without recomputation."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from core.rpc import worker_pb2 as pb
from core.rpc import worker_pb2_grpc
from core.types.request import Role, SampledToken, Sampling
from core.wire.channel import open_channel
from tests.e2e.conftest import Checkpoint, Reference
from tests.engine.steps import prompts
from tests.engine.tiny_models import DELTA_NET
from tests.support.ceiling import Ceiling
from tests.support.grids import quick
from tests.support.identities import rank
from tests.support.local_cluster import Answer, LocalCluster, LocalReplica, local_cluster
from tests.support.waiting import WITHIN_S
from worker.gang_runner import GangRunner

_NUM_TOKENS = 160
_SAMPLINGS = {
    "greedy": Sampling(max_tokens=_NUM_TOKENS, temperature=0.0),
    "seeded": Sampling(
        max_tokens=_NUM_TOKENS,
        temperature=0.9,
        top_p=0.95,
        seed=11,
        num_logprobs=1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        stop_token_ids=(3,),
        min_tokens=140,
    ),
}


def _tree(*, tp: int) -> dict[str, Any]:
    return {
        "model": {"dtype": "float32"},
        "kv": {"wire_dtype": "raw"},
        "prefill": {"kv_memory_gib": 0.01},
        "decode": {"kv_memory_gib": 0.02, "tensor_parallel": tp},
        "router": {"max_local_prefill": 0},
    }


async def _tokens_from(cluster: LocalCluster, replica: LocalReplica, *, at_least: int) -> None:
    """Wait until a replica has generated `at_least` tokens."""
    seen = cluster.seen(replica)
    await cluster.until(lambda: seen.status.totals.generated_tokens >= at_least)


def _computed(cluster: LocalCluster) -> int:
    return sum(replica.status.totals.computed_tokens for replica in cluster.replicas)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("tp", "kind", "is_async", "family"),
    [
        *quick([(2, "greedy", False, "llama"), (2, "greedy", True, "llama")], ()),
        (1, "seeded", False, "llama"),
        (2, "greedy", True, "qwen3_5"),
    ],
)
async def test_running_sequences_migrate_with_unchanged_tokens(
    checkpoint: Checkpoint,
    reference: Reference,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    tp: int,
    is_async: bool,
    family: str,
) -> None:
    """This holds with synchronous and with asynchronous steps, as on a GPU, and with recurrent layers."""
    monkeypatch.setattr(GangRunner, "is_async", is_async)
    model_dir = checkpoint(family, **(DELTA_NET | {"initializer_range": 0.3} if family == "qwen3_5" else {}))
    inputs, sampling = prompts(20, 33, 48), _SAMPLINGS[kind]
    expected = reference(model_dir, inputs, sampling)
    running_on = Ceiling(40)
    running_on.arm(monkeypatch.setattr)
    async with local_cluster(model_dir, redis_url, **_tree(tp=tp)) as cluster:
        leaving = cluster.pools[Role.DECODE][0]
        running = [asyncio.create_task(cluster.generate(p, sampling, id=str(i))) for i, p in enumerate(inputs)]
        await _tokens_from(cluster, leaving, at_least=60)
        coming = await cluster.add(Role.DECODE)
        await cluster.drain(leaving)
        running_on.lift()
        answers: list[Answer] = [await task for task in running]
        for answer, tokens in zip(answers, expected, strict=True):
            assert [_facts(token) for token in answer.tokens[0]] == [_facts(token) for token in tokens]
            assert _logprobs(answer.tokens[0]) == pytest.approx(_logprobs(tokens), abs=1e-3)
        assert [(answer.route.decode_replica, answer.route.migrations) for answer in answers] == [(coming.id, 0)] * 3
        await cluster.idle()
        assert _computed(cluster) == sum(map(len, inputs)), "something was computed again"


async def test_failed_migration_leaves_the_sequence_in_place(
    checkpoint: Checkpoint, reference: Reference, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir, [inputs], sampling = checkpoint("llama"), prompts(40), _SAMPLINGS["greedy"]
    expected = reference(model_dir, [inputs], sampling)[0]
    running_on = Ceiling(20)
    running_on.arm(monkeypatch.setattr)
    async with local_cluster(model_dir, redis_url, **_tree(tp=1)) as cluster:
        source = cluster.pools[Role.DECODE][0]
        seen = cluster.seen(source)
        running = asyncio.create_task(cluster.generate(inputs, sampling))
        await _tokens_from(cluster, source, at_least=19)  # the first token came from the prefill replica
        nowhere = pb.Handoff(
            id="h", epoch=1, replica="x", ranks=["127.0.0.1:1"], num_tokens=len(inputs), max_tokens=10_000, ttl_s=5.0
        )
        request = pb.MigrateRequest(router="router-0", stream=1, handoff=nowhere)  # the router's first stream
        async with open_channel(seen.member.address, peer=rank(source.id), identity=cluster.router) as channel:
            stub = worker_pb2_grpc.DecodeWorkerStub(channel)
            failed = await stub.Migrate(request, timeout=WITHIN_S)
            assert not failed.moved and "127.0.0.1:1" in failed.reason
            abandoned = stub.Migrate(request)  # cancelled call
            abandoned.cancel()
        running_on.lift()
        answer = await running
        assert answer.ids == [token.token_id for token in expected]
        assert seen.status.totals.migrations == 0
        await cluster.idle()


async def test_clients_that_disconnect_during_migration_free_everything(
    checkpoint: Checkpoint, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ceiling(100).arm(monkeypatch.setattr)
    moments, inputs = random.Random(5), prompts(*range(20, 60, 2))
    async with local_cluster(checkpoint("llama"), redis_url, **_tree(tp=2)) as cluster:
        leaving = cluster.pools[Role.DECODE][0]
        sampling = _SAMPLINGS["greedy"]
        running = [asyncio.create_task(cluster.generate(p, sampling, id=str(i))) for i, p in enumerate(inputs)]
        await _tokens_from(cluster, leaving, at_least=100)
        await cluster.add(Role.DECODE)
        draining = asyncio.create_task(cluster.drain(leaving))
        for task in running:
            await asyncio.wait({task}, timeout=moments.expovariate(30))
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await draining
        await cluster.idle()


def _facts(token: SampledToken) -> tuple[int, str | None]:
    return token.token_id, token.finish_reason


def _logprobs(tokens: list[SampledToken]) -> list[float]:
    return [token.logprob.logprob for token in tokens if token.logprob]
