"""Role switches: a replica joins the other pool and keeps its weights and blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

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
from router.routing.candidates import Option
from router.routing.policies import RoundRobin
from tests.e2e.conftest import Lab, exact_tree, on_device
from tests.engine.steps import prompts
from tests.support.fake_policy import FakePolicy
from tests.support.grids import quick
from tests.support.identities import rank
from tests.support.local_cluster import Answer, LocalCluster
from tests.support.rank_in_process import shared_ceiling
from tests.support.waiting import WITHIN_S, becomes

_GREEDY = Sampling(max_tokens=40, temperature=0.0)
_SAMPLED = Sampling(max_tokens=40, temperature=1.0, top_p=0.9, seed=7)


@pytest.mark.parametrize(
    ("tp", "device"), [*quick([(1, "cpu"), (2, "cpu")], [(1, "cpu")]), pytest.param(1, "cuda", marks=pytest.mark.gpu)]
)
async def test_streams_continue_while_replicas_switch_roles_both_ways(lab: Lab, tp: int, device: str) -> None:
    model_dir, inputs = lab.checkpoint("llama"), prompts(*range(33, 49))
    samplings = [_GREEDY, _SAMPLED] * 8
    expected = lab.reference.ids(model_dir, inputs, samplings, device=device)
    running_on, tree = shared_ceiling(20), on_device(device, exact_tree(0, 0, tp=(tp, tp)))
    tree["decode"] |= {"max_running": 16}
    async with lab.own(model_dir, processes=True, policy=RoundRobin(), **tree) as cluster:
        roles = [Role.PREFILL] * 2 + [Role.DECODE] * 2
        prefill, _, decode, _ = await asyncio.gather(*(cluster.add(role, ceiling=running_on) for role in roles))
        running: list[asyncio.Task[Answer]] = []

        def ask(first: int, end: int) -> None:
            for number in range(first, end):
                generation = cluster.generate(inputs[number], samplings[number], id=str(number))
                running.append(asyncio.create_task(generation))

        ask(0, 8)
        await cluster.until(lambda: cluster.seen(decode).status.totals.generated_tokens >= 40)
        blocks = decode.blocks["total"]
        to_prefill = await cluster.switch(decode)
        assert cluster.replicas.get(decode.id) is None
        assert to_prefill.blocks["total"] == blocks and to_prefill.blocks["cached"], "what it had it has still"
        ask(8, 12)
        to_decode = await cluster.switch(prefill)  # while prompts are shipped
        ask(12, 16)
        running_on.lift()
        async with asyncio.timeout(WITHIN_S):
            answers = await asyncio.gather(*running)
        assert [answer.ids for answer in answers] == expected
        assert to_prefill.id in {answer.route.prefill_replica for answer in answers}
        assert to_decode.id in {answer.route.decode_replica for answer in answers}


async def test_cached_blocks_are_indexed_under_the_new_name_only(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    rest_calls: list[int | None] = []
    monkeypatch.setattr(ModelRunner, "rest", lambda self, num_first: rest_calls.append(num_first))
    [prompt], policy = prompts(65), FakePolicy(Option(prefill="prefill-0", decode="decode-3"))
    async with lab.own(lab.checkpoint("llama"), policy=policy, **exact_tree(2, 2)) as cluster:
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
        policy.default = [Option(prefill=successor.id, decode="decode-2")]
        again = await cluster.generate(prompt, _GREEDY, id="again")
        assert again.route.prefill_replica == successor.id and again.route.cached_tokens == 64
        assert again.ids == first.ids


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
