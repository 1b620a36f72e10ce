"""Running answers move to another decode replica, because theirs drains or is crowded, without recomputation."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from core.rpc import worker_pb2 as pb
from core.rpc import worker_pb2_grpc
from core.types.request import Role, SampledToken, Sampling
from core.wire.channel import open_channel
from router.routing.candidates import CandidateReplica, Option, RoutingRequest
from router.routing.policies import RoundRobin
from tests.e2e.conftest import Lab, exact_tree
from tests.engine.steps import prompts
from tests.engine.tiny_models import DELTA_NET
from tests.support.grids import quick
from tests.support.identities import rank
from tests.support.local_cluster import Answer, LocalCluster, LocalReplica
from tests.support.long_answers import Ceiling
from tests.support.waiting import WITHIN_S, beside
from worker.gang_runner import GangRunner

_NUM_TOKENS = 160
_GREEDY = Sampling(max_tokens=_NUM_TOKENS, temperature=0.0)
_SAMPLED = Sampling(max_tokens=_NUM_TOKENS, temperature=1.0, seed=7)
_RULED = Sampling(
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
)
_CROWDED = "decode-1"


def _tree(prefill: int, decode: int, *, tp: int = 1) -> dict[str, Any]:
    tree = exact_tree(prefill, decode, tp=(1, tp))
    tree["decode"] |= {"kv_memory_gib": 0.05}
    return tree


def _start(cluster: LocalCluster, inputs: Sequence[list[int]], sampling: Sampling) -> list[asyncio.Task[Answer]]:
    return [asyncio.create_task(cluster.generate(prompt, sampling, id=str(len(prompt)))) for prompt in inputs]


async def _tokens_from(cluster: LocalCluster, replica: LocalReplica, *, at_least: int) -> None:
    """Wait until a replica has generated `at_least` tokens."""
    seen = cluster.seen(replica)
    await cluster.until(lambda: seen.status.totals.generated_tokens >= at_least)


@pytest.fixture
def running_on(monkeypatch: pytest.MonkeyPatch) -> Ceiling:
    """Stop answers at 20 tokens until the test goes on."""
    ceiling = Ceiling(20)
    ceiling.arm(monkeypatch.setattr)
    return ceiling


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("tp", "sampling", "is_async", "family"),
    [
        *quick([(2, _GREEDY, False, "llama"), (2, _GREEDY, True, "llama")], ()),
        (1, _RULED, False, "llama"),
        (2, _GREEDY, True, "qwen3_5"),
    ],
    ids=lambda value: {_RULED: "seeded", _GREEDY: "greedy"}.get(value),
)
async def test_running_sequences_migrate_with_unchanged_tokens(
    lab: Lab,
    monkeypatch: pytest.MonkeyPatch,
    running_on: Ceiling,
    tp: int,
    sampling: Sampling,
    is_async: bool,
    family: str,
) -> None:
    """This holds with synchronous and with asynchronous steps, as on a GPU, and with recurrent layers."""
    monkeypatch.setattr(GangRunner, "is_async", is_async)
    model_dir = lab.checkpoint(family, **(DELTA_NET | {"initializer_range": 0.3} if family == "qwen3_5" else {}))
    inputs = prompts(20, 33, 48)
    expected = lab.reference(model_dir, inputs, sampling)
    async with lab.own(model_dir, **_tree(1, 1, tp=tp)) as cluster:
        leaving = cluster.pools[Role.DECODE][0]
        running = _start(cluster, inputs, sampling)
        await _tokens_from(cluster, leaving, at_least=50)
        coming = await cluster.add(Role.DECODE)
        await cluster.drain(leaving)
        running_on.lift()
        answers = [await task for task in running]
        for answer, tokens in zip(answers, expected, strict=True):
            assert [_facts(token) for token in answer.tokens[0]] == [_facts(token) for token in tokens]
            assert _logprobs(answer.tokens[0]) == pytest.approx(_logprobs(tokens), abs=1e-3)
        assert [(answer.route.decode_replica, answer.route.migrations) for answer in answers] == [(coming.id, 0)] * 3
        await cluster.idle()
        num_computed = sum(replica.status.totals.computed_tokens for replica in cluster.replicas)
        assert num_computed == sum(map(len, inputs)), "something was computed again"


async def test_failed_migration_leaves_the_sequence_in_place(lab: Lab, running_on: Ceiling) -> None:
    model_dir, inputs = lab.checkpoint("llama"), prompts(40)
    expected = lab.reference.ids(model_dir, inputs, _GREEDY)
    async with lab.own(model_dir, **_tree(1, 1)) as cluster:
        source = cluster.pools[Role.DECODE][0]
        seen = cluster.seen(source)
        [running] = _start(cluster, inputs, _GREEDY)
        await _tokens_from(cluster, source, at_least=19)  # the first token came from the prefill replica
        nowhere = pb.Handoff(
            id="h", epoch=1, replica="x", ranks=["127.0.0.1:1"], num_tokens=40, max_tokens=10_000, ttl_s=5.0
        )
        request = pb.MigrateRequest(router="router-0", stream=1, handoff=nowhere)  # the router's first stream
        async with open_channel(seen.member.address, peer=rank(source.id), identity=cluster.router) as channel:
            stub = worker_pb2_grpc.DecodeWorkerStub(channel)
            failed = await stub.Migrate(request, timeout=WITHIN_S)
            assert not failed.moved and "127.0.0.1:1" in failed.reason
            abandoned = stub.Migrate(request)  # cancelled call
            abandoned.cancel()
        running_on.lift()
        assert [(await running).ids] == expected
        assert seen.status.totals.migrations == 0


async def test_clients_that_disconnect_during_migration_free_everything(lab: Lab, running_on: Ceiling) -> None:
    moments = random.Random(5)
    async with lab.own(lab.checkpoint("llama"), **_tree(1, 1, tp=2)) as cluster:
        leaving = cluster.pools[Role.DECODE][0]
        running = _start(cluster, prompts(*range(20, 60, 2)), _GREEDY)
        await _tokens_from(cluster, leaving, at_least=100)
        await cluster.add(Role.DECODE)
        draining = asyncio.create_task(cluster.drain(leaving))
        for task in running:
            await asyncio.wait({task}, timeout=moments.expovariate(30))
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await draining


async def test_one_replica_of_each_pool_leaves_under_load(lab: Lab, running_on: Ceiling) -> None:
    """A draining replica takes no new requests and finishes all that it has."""
    model_dir, inputs = lab.checkpoint("llama"), prompts(*range(20, 52))
    expected = lab.reference.ids(model_dir, inputs, _GREEDY)
    async with lab.own(model_dir, policy=RoundRobin(), **_tree(2, 2)) as cluster:
        leaving = [cluster.pools[role].pop() for role in Role]
        running = _start(cluster, inputs[:16], _GREEDY)
        seen = [cluster.seen(replica) for replica in leaving]
        await _tokens_from(cluster, leaving[1], at_least=30)
        draining = asyncio.gather(*(_leave(cluster, replica) for replica in leaving))
        await cluster.until(lambda: not any(replica.is_usable for replica in seen))
        running_on.lift()
        late = await asyncio.gather(*_start(cluster, inputs[16:], _GREEDY))
        await draining
        answers = [await task for task in running] + late
        assert [answer.ids for answer in answers] == expected
        served = {name for answer in late for name in (answer.route.prefill_replica, answer.route.decode_replica)}
        assert served.isdisjoint(replica.id for replica in leaving)


async def _leave(cluster: LocalCluster, replica: LocalReplica) -> None:
    await cluster.drain(replica)
    await asyncio.to_thread(replica.ranks[0].stop)


async def test_a_replica_that_joins_is_used(lab: Lab) -> None:
    async with lab.own(lab.checkpoint("llama"), **_tree(2, 0)) as cluster:
        [waiting] = _start(cluster, prompts(30), _GREEDY)
        newcomer = await cluster.add(Role.DECODE)
        assert (await waiting).route.decode_replica == newcomer.id


class Crowding:
    """Policy that sends everything to one decode replica."""

    def options(
        self, demand: RoutingRequest, prefills: Sequence[CandidateReplica], decodes: Sequence[CandidateReplica]
    ) -> Sequence[Option]:
        candidates = [view for view in decodes if view.replica == _CROWDED] or decodes
        return RoundRobin().options(demand, prefills, candidates)


@pytest.mark.parametrize("sampling", quick([_GREEDY, _SAMPLED], [_SAMPLED]), ids=["greedy", "sampled"])
async def test_crowded_requests_spread_with_unchanged_tokens(lab: Lab, running_on: Ceiling, sampling: Sampling) -> None:
    model_dir, inputs = lab.checkpoint("llama"), prompts(*range(20, 28))
    expected = lab.reference.ids(model_dir, inputs, sampling)
    async with lab.own(model_dir, policy=Crowding(), **_tree(1, 2)) as cluster:
        async with beside(cluster.core.rebalance_forever()):
            running = _start(cluster, inputs, sampling)
            emptier = cluster.seen(cluster.pools[Role.DECODE][1])
            await cluster.until(lambda: emptier.status.running >= 2)
            running_on.lift()
            answers = [await task for task in running]
        assert [answer.ids for answer in answers] == expected
        assert sum(cluster.seen(decode).status.totals.migrations for decode in cluster.pools[Role.DECODE]) >= 2
        assert {answer.route.decode_replica for answer in answers} == {"decode-1", "decode-2"}


async def test_migrated_request_migrates_again_when_its_replica_drains(lab: Lab, running_on: Ceiling) -> None:
    model_dir, inputs = lab.checkpoint("llama"), prompts(*range(20, 28))
    expected = lab.reference.ids(model_dir, inputs, _GREEDY)
    async with lab.own(model_dir, policy=Crowding(), **_tree(1, 2)) as cluster:
        async with beside(cluster.core.rebalance_forever()):
            running = _start(cluster, inputs, _GREEDY)
            newcomer = next(replica for replica in cluster.pools[Role.DECODE] if replica.id != _CROWDED)
            await cluster.until(lambda: cluster.seen(newcomer).status.running)  # the first choice has moved
            await cluster.drain(newcomer)
            running_on.lift()
            answers = [await task for task in running]
        assert [answer.ids for answer in answers] == expected
        assert {answer.route.decode_replica for answer in answers} == {_CROWDED}
        assert [answer.route.migrations for answer in answers] == [0] * len(answers), "it was computed again"


def _facts(token: SampledToken) -> tuple[int, str | None]:
    return token.token_id, token.finish_reason


def _logprobs(tokens: list[SampledToken]) -> list[float]:
    return [token.logprob.logprob for token in tokens if token.logprob]
