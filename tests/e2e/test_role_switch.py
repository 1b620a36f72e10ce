"""Role switches: a replica joins the other pool and keeps its weights and blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from grpc import aio

from core.rpc import worker_pb2 as pb
from core.rpc import worker_pb2_grpc
from core.types.errors import ReplicaFailed, ReplicaLost
from core.types.prefix_hash import block_hashes, root_hash
from core.types.request import Role, Sampling
from core.wire.call_errors import error_of
from core.wire.channel import open_channel
from engine.runner.runner import ModelRunner
from router.routing.plain_policies import RoundRobin
from router.routing.policy import CandidateReplica, Option, RoutingRequest
from tests.e2e.conftest import Checkpoint, Reference
from tests.engine.steps import prompts
from tests.support.ceiling import Ceiling
from tests.support.grids import quick
from tests.support.identities import rank
from tests.support.local_cluster import Answer, LocalCluster, local_cluster
from tests.support.waiting import WITHIN_S, becomes

_GREEDY = Sampling(max_tokens=40, temperature=0.0)
_STREAMS = 8


def _tree(*, tp: int) -> dict[str, Any]:
    pool = {"replicas": 2, "kv_memory_gib": 0.01, "tensor_parallel": tp}
    return {
        "model": {"dtype": "float32"},
        "kv": {"wire_dtype": "raw"},
        "prefill": {**pool, "max_batch_tokens": 32},
        "decode": pool,
        "router": {"max_local_prefill": 0},
    }


@pytest.mark.parametrize("tp", quick([1, 2], [1]))
async def test_streams_continue_while_replicas_switch_roles_both_ways(
    checkpoint: Checkpoint, reference: Reference, redis_url: str, monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    model_dir, inputs = checkpoint("llama"), prompts(*range(33, 33 + 2 * _STREAMS))
    expected = reference.ids(model_dir, inputs, _GREEDY)
    running_on = Ceiling(20)
    running_on.arm(monkeypatch.setattr)
    async with local_cluster(model_dir, redis_url, policy=RoundRobin(), **_tree(tp=tp)) as cluster:
        [prefill, _], [_, decode] = cluster.pools[Role.PREFILL], cluster.pools[Role.DECODE]
        running = _ask(cluster, inputs[:_STREAMS])
        await cluster.until(lambda: cluster.seen(decode).status.totals.generated_tokens >= 40)
        to_prefill = await cluster.switch(decode)
        assert cluster.replicas.get(decode.id) is None
        assert to_prefill.blocks == decode.blocks and to_prefill.blocks["cached"], "what it had it has still"
        running += _ask(cluster, inputs[_STREAMS:-4])
        to_decode = await cluster.switch(prefill)  # while prompts are shipped
        running += _ask(cluster, inputs[-4:])
        running_on.lift()
        answers: list[Answer] = [await task for task in running]
        assert [answer.ids for answer in answers] == expected
        assert to_prefill.id in {answer.route.prefill_replica for answer in answers}
        assert to_decode.id in {answer.route.decode_replica for answer in answers}


class FakePolicy:
    """Policy that sends every prompt by one given route."""

    def __init__(self) -> None:
        self.way = Option(prefill="prefill-0", decode="decode-3")

    def options(
        self, demand: RoutingRequest, prefills: Sequence[CandidateReplica], decodes: Sequence[CandidateReplica]
    ) -> Sequence[Option]:
        return [self.way]


async def test_cached_blocks_are_indexed_under_the_new_name_only(
    checkpoint: Checkpoint, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest_calls: list[int | None] = []
    monkeypatch.setattr(ModelRunner, "rest", lambda self, num_first: rest_calls.append(num_first))
    [prompt], policy = prompts(65), FakePolicy()
    async with local_cluster(checkpoint("llama"), redis_url, policy=policy, **_tree(tp=1)) as cluster:
        first = await cluster.generate(prompt, _GREEDY, id="first")
        [_, held] = cluster.pools[Role.DECODE]
        hashes = block_hashes(root_hash(cluster.model), prompt, block_size=16)
        await cluster.until(lambda: cluster.replicas.index.match(hashes).get(held.id) == 4)
        address = cluster.seen(held).member.address
        with pytest.raises(ReplicaFailed, match="replica has not drained"):
            held.ranks[0].hand_over()
        successor = await cluster.switch(held)
        assert rest_calls == [None], "the draft heads' rest state must be reset"
        await becomes(lambda: cluster.replicas.index.match(hashes).get(successor.id) == 4)
        assert held.id not in cluster.replicas.index.match(hashes)
        with pytest.raises(ReplicaLost):
            await _pull(cluster, held.id, address, hashes)
        policy.way = Option(prefill=successor.id, decode="decode-2")
        again = await cluster.generate(prompt, _GREEDY, id="again")
        assert again.route.prefill_replica == successor.id and again.route.cached_tokens == 64
        assert again.ids == first.ids


def _ask(cluster: LocalCluster, inputs: Sequence[list[int]]) -> list[asyncio.Task[Answer]]:
    return [asyncio.create_task(cluster.generate(prompt, _GREEDY, id=f"{len(prompt)}")) for prompt in inputs]


async def _pull(cluster: LocalCluster, replica: str, address: str, hashes: Sequence[bytes]) -> None:
    """Fetch as a replica that has cached the old name. Raises ClusterError."""
    source_identity = cluster.identity(rank("decode-99"))
    async with open_channel(address, peer=rank(replica), identity=source_identity) as channel:
        handoff = pb.Handoff(id="h", epoch=1, replica="decode-99", ranks=["127.0.0.1:1"], max_tokens=16, ttl_s=5.0)
        request = pb.FetchRequest(handoff=handoff, hashes=hashes[0])
        try:
            async for _ in worker_pb2_grpc.PrefixFetchStub(channel).Fetch(request, timeout=WITHIN_S):
                pass
        except aio.AioRpcError as error:
            raise error_of(error, peer=replica) from error
