"""Prefix fetches between replicas: answers equal those of one process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import redis

from core.rpc.worker_pb2 import Totals
from core.types.failpoint import FailpointStage
from core.types.prefix_hash import block_hashes, root_hash
from core.types.request import Role, Sampling
from core.types.step_timing import StepTiming
from router.routing.candidates import CandidateReplica, Option, RoutingRequest
from router.routing.policies import CostPolicy
from router.serving.replicas import Replicas
from tests.e2e.conftest import Lab, exact_tree, on_device
from tests.engine.steps import prompts
from tests.support.fake_policy import FakePolicy
from tests.support.grids import quick
from tests.support.local_cluster import Answer, LocalCluster
from tests.support.rank_in_process import Fault
from tests.support.waiting import WITHIN_S, becomes

_GREEDY = Sampling(max_tokens=24, temperature=0.0)


async def _ask(cluster: LocalCluster, policy: FakePolicy, prompt: list[int], *ways: str, fetch: int = 0) -> Answer:
    """Set the routes of a prompt: "P > D", or "P < S > D" if P fetches `fetch` tokens from S; P may be missing."""
    policy.ways[len(prompt)] = options = []
    for way in ways:
        left, _, decode = way.replace(" ", "").rpartition(">")
        prefill, _, source = left.partition("<")
        options.append(Option(prefill=prefill or None, decode=decode, fetch_from=source or None, fetch_tokens=fetch))
    return await cluster.generate(prompt, _GREEDY)


async def _fetches(cluster: LocalCluster, number: int, *, num_fetches: int) -> Totals:
    """Return a prefill replica's totals once the expected fetches are counted, because frames lag behind answers."""
    await cluster.until(lambda: _num_fetches(cluster.totals(Role.PREFILL, number)) >= num_fetches)
    return cluster.totals(Role.PREFILL, number)


def _num_fetches(totals: Totals) -> int:
    return totals.prefix_fetches + totals.fetch_failures


@pytest.mark.parametrize("tp", quick([1, 2], [2]))
async def test_prefix_is_fetched_from_another_prefill_replica(lab: Lab, tp: int) -> None:
    model_dir, prompt, policy = lab.checkpoint("llama"), prompts(70)[0], FakePolicy()
    longer = prompt + prompts(30)[0]
    async with lab.shared(model_dir, policy=policy, **exact_tree(2, 2, tp=(tp, 1))) as cluster:
        first = await _ask(cluster, policy, prompt, "prefill-0 > decode-2")
        second = await _ask(cluster, policy, longer, "prefill-1 < prefill-0 > decode-3", fetch=64)
        assert [first.ids, second.ids] == lab.reference.ids(model_dir, [prompt, longer], _GREEDY)
        assert (second.route.cached_tokens, second.route.fetched_tokens) == (0, 64)
        totals = await _fetches(cluster, 1, num_fetches=1)
        assert (totals.prefix_fetches, totals.fetched_tokens, totals.fetch_failures) == (1, 64, 0)
        assert totals.computed_tokens == 100 - 64
        again = await _ask(cluster, policy, longer, "prefill-1 > decode-2")
        assert (again.ids, again.route.cached_tokens) == (second.ids, 96), "fetched blocks must be cached"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
async def test_answer_of_one_turn_is_fetched_for_the_next(lab: Lab, device: str) -> None:
    """The prefix moves from a decode replica to a prefill replica, to another decode replica, and back."""
    model_dir, turn, policy = lab.checkpoint("llama"), prompts(20)[0], FakePolicy()
    tree, ways = exact_tree(1, 2), ["prefill-0 > decode-1", "prefill-0 < decode-1 > decode-2", "< decode-2 > decode-1"]
    async with lab.shared(model_dir, policy=policy, processes=device == "cuda", **on_device(device, tree)) as cluster:
        fetched = []
        for way in ways:
            answer = await _ask(cluster, policy, turn, way, fetch=len(turn))
            assert [answer.ids] == lab.reference.ids(model_dir, [turn], _GREEDY, device=device)
            fetched.append((answer.route.cached_tokens, answer.route.fetched_tokens))
            turn = turn + answer.ids + prompts(8)[0]
        # There are 43 positions after the first turn, 75 after the second. The prefill replica had one block, the first
        # decode replica two.
        assert fetched == [(0, 0), (16, 16), (32, 32)]


async def test_source_ships_only_blocks_that_it_still_has(lab: Lab) -> None:
    model_dir, (prompt, other), policy = lab.checkpoint("llama"), prompts(70, 40), FakePolicy()
    async with lab.shared(model_dir, policy=policy, **exact_tree(2, 1)) as cluster:
        await _ask(cluster, policy, prompt[:40], "prefill-0 > decode-2")
        some = await _ask(cluster, policy, prompt, "prefill-1 < prefill-0 > decode-2", fetch=64)
        none = await _ask(cluster, policy, other, "prefill-1 < prefill-0 > decode-2", fetch=32)
        gone = await _ask(cluster, policy, other[1:], "prefill-1 < prefill-9 > decode-2", fetch=32)
        assert [some.ids, none.ids, gone.ids] == lab.reference.ids(model_dir, [prompt, other, other[1:]], _GREEDY)
        assert [answer.route.fetched_tokens for answer in (some, none, gone)] == [32, 0, 0]
        totals = await _fetches(cluster, 1, num_fetches=2)
        assert (totals.prefix_fetches, totals.fetch_failures) == (1, 1)


_HOLDER_EVENTS = {
    "it is asked": Fault(FailpointStage.ASKED),
    "it has taken what is wanted": Fault(FailpointStage.SERVING_FETCH),
    "it ships": Fault(FailpointStage.SENDING),
    "it has shipped": Fault(FailpointStage.SHIPPED),
}


# A frozen process takes seconds to detect; test_network.py has a silent replica.
_CASES = quick(
    product(_HOLDER_EVENTS, [signal.SIGKILL, signal.SIGSTOP]),
    [("it is asked", signal.SIGKILL), ("it ships", signal.SIGKILL)],
)


@pytest.mark.parametrize(("event", "number"), _CASES)
async def test_the_holder_dies_in_a_pull(lab: Lab, event: str, number: signal.Signals) -> None:
    """The source's own request is over, so it ships to no one else. The fetching replica serves others meanwhile."""
    model_dir, (prompt, other), policy = lab.checkpoint("llama"), prompts(70, 40), FakePolicy()
    fault = replace(_HOLDER_EVENTS[event], number=number)
    async with lab.own(model_dir, processes=True, policy=policy, **exact_tree(1, 1)) as cluster:
        prefix_source = await cluster.add(Role.DECODE, fault)
        prefill, decode = (cluster.pools[role][0].id for role in (Role.PREFILL, Role.DECODE))
        first = await _ask(cluster, policy, prompt, f"> {prefix_source.id}")
        async with asyncio.timeout(WITHIN_S):
            pulling = asyncio.create_task(
                _ask(cluster, policy, prompt + first.ids[:9], f"{prefill} < {prefix_source.id} > {decode}", fetch=64)
            )
            beside = await _ask(cluster, policy, other, f"{prefill} > {decode}")
            answer = await pulling
        assert [answer.ids, beside.ids] == lab.reference.ids(model_dir, [prompt + first.ids[:9], other], _GREEDY)
        assert prefix_source.has_been_hit, "the fault never happened"
        assert answer.route.attempts == 1
        if number is signal.SIGSTOP:
            prefix_source.send(signal.SIGCONT)


async def test_fetching_replica_dies(lab: Lab) -> None:
    model_dir, prompt, policy = lab.checkpoint("llama"), prompts(70)[0], FakePolicy()
    async with lab.own(model_dir, processes=True, policy=policy, **exact_tree(1, 1)) as cluster:
        prefill, decode = (cluster.pools[role][0].id for role in (Role.PREFILL, Role.DECODE))
        doomed = await cluster.add(Role.PREFILL, Fault(FailpointStage.LANDED))
        await _ask(cluster, policy, prompt, f"{prefill} > {decode}")
        ways = f"{doomed.id} < {prefill} > {decode}", f"{prefill} > {decode}"
        async with asyncio.timeout(WITHIN_S):
            answer = await _ask(cluster, policy, prompt, *ways, fetch=64)
        assert [answer.ids] == lab.reference.ids(model_dir, [prompt], _GREEDY)
        assert doomed.has_been_hit and answer.route.prefill_replica == prefill


async def test_cancelled_fetch_frees_everything(lab: Lab) -> None:
    prompt, policy = prompts(70)[0], FakePolicy()
    tree = exact_tree(1, 1) | {"timeouts": {"transfer_s": 60.0}}  # no deadline ends the fetch within the test
    async with lab.own(lab.checkpoint("llama"), processes=True, policy=policy, **tree) as cluster:
        prefix_source = await cluster.add(Role.DECODE)
        prefill, decode = (cluster.pools[role][0].id for role in (Role.PREFILL, Role.DECODE))
        await _ask(cluster, policy, prompt, f"> {prefix_source.id}")
        prefix_source.send(signal.SIGSTOP)
        generating = asyncio.create_task(
            _ask(cluster, policy, prompt, f"{prefill} < {prefix_source.id} > {decode}", fetch=64)
        )
        await cluster.until(lambda: (seen := cluster.replicas.get(prefill)) and seen.status.running)
        generating.cancel()
        others = [replica for replica in cluster.replicas if replica.id != prefix_source.id]
        await cluster.until(lambda: not any(replica.status.running for replica in others))
        prefix_source.send(signal.SIGCONT)


class SteadyRates:
    """Cost policy with a fixed rate of 1,000 tokens/s, independent of the machine's load."""

    def __init__(self) -> None:
        self.replicas: Replicas | None = None  # queued tokens by replica
        self._policy = CostPolicy(prefix_fetches=True)

    def options(
        self, demand: RoutingRequest, prefills: Sequence[CandidateReplica], decodes: Sequence[CandidateReplica]
    ) -> Sequence[Option]:
        return self._policy.options(demand, [self._steady(v) for v in prefills], [self._steady(v) for v in decodes])

    def _steady(self, view: CandidateReplica) -> CandidateReplica:
        replica = self.replicas.get(view.replica) if self.replicas else None
        timing = StepTiming(base_s=0.0, token_s=1e-3)
        queue_s = replica.load().queued_tokens * timing.token_s if replica else 0.0
        return replace(view, timing=timing, queue_s=queue_s, link_bytes_per_s=1e8)


async def _known(cluster: LocalCluster, tokens: list[int], num_tokens: int) -> None:
    """Wait until the router's index lists a replica with that many leading tokens."""
    hashes = block_hashes(root_hash(cluster.model), tokens, block_size=16)
    await becomes(lambda: max(cluster.replicas.index.match(hashes).values(), default=0) * 16 >= num_tokens)


async def test_each_chat_turn_computes_only_new_tokens(lab: Lab) -> None:
    """The real policy and index choose the sources. Redis is emptied before the last turn."""
    model_dir, turn, num_known = lab.checkpoint("llama", max_position_embeddings=512), prompts(52)[0], 0
    rates = SteadyRates()
    async with lab.own(model_dir, policy=rates, **exact_tree(2, 2)) as cluster:
        rates.replicas = cluster.replicas
        for number in range(4):
            await _known(cluster, turn, num_known)
            if number == 3:
                redis.Redis.from_url(lab.redis_url).flushdb()
            answer = await cluster.generate(turn, _GREEDY)
            assert [answer.ids] == lab.reference.ids(model_dir, [turn], _GREEDY)
            if number < 3:
                assert answer.route.cached_tokens + answer.route.fetched_tokens == num_known
                assert answer.route.fetched_tokens >= 16 * (number > 0), "the answer comes from who gave it"
            num_known = (len(turn) + len(answer.ids) - 1) // 16 * 16
            turn = turn + answer.ids + prompts(21)[0]


async def test_a_hot_prefix_is_copied_before_it_queues(lab: Lab) -> None:
    model_dir, prefix = lab.checkpoint("llama", max_position_embeddings=512), prompts(320)[0]
    inputs = [prefix + prompts(100 + i)[0][::-1] for i in range(8)]
    rates = SteadyRates()
    async with lab.own(model_dir, policy=rates, **exact_tree(2, 1)) as cluster:
        rates.replicas = cluster.replicas
        first = await cluster.generate(prefix, _GREEDY)
        await _known(cluster, prefix, 320)
        answers = await cluster.generate_all(inputs, _GREEDY)
        assert [answer.ids for answer in answers] == lab.reference.ids(model_dir, inputs, _GREEDY)
        ids = [replica.id for replica in cluster.pools[Role.PREFILL]]
        assert {answer.route.prefill_replica for answer in answers} == set(ids)
        # A sibling that overtakes the fetching one may compute the prefix itself, so that nothing is left to fetch.
        reused = [answer.route.cached_tokens + answer.route.fetched_tokens for answer in answers]
        fetched = sum(answer.route.fetched_tokens for answer in answers)
        assert sum(reused) >= 6 * 320 and (fetched >= 320 or 0 in reused)
        other = 1 - ids.index(first.route.prefill_replica)
        assert (await _fetches(cluster, other, num_fetches=min(1, fetched))).fetched_tokens == fetched
