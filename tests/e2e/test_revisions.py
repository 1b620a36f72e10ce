"""Two concurrent revisions of a deployment: traffic split, migrations and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cluster.rollout.spec_diff import kind_of, tokens_of, updated
from cluster.rollout.update_plan import problem_of
from core.spec.schema import Spec
from core.types.request import Role, Sampling
from core.types.revisions import Revision, RevisionTable
from tests.e2e.conftest import Lab, exact_tree
from tests.engine.steps import prompts
from tests.support.local_cluster import Answer, LocalCluster, LocalReplica

_GREEDY = Sampling(max_tokens=40, temperature=0.0)
_DETERMINISTIC: dict[str, Any] = {
    **exact_tree(1, 1),
    "model": {"dtype": "bfloat16"},
    "engine": {"deterministic": True},
}


class _Revisions:
    """Revisions of a cluster. The first is the one that it was started with."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.specs = [cluster.spec]
        self.replicas: list[list[LocalReplica]] = [[replica for pool in cluster.pools.values() for replica in pool]]
        self._version = 0

    async def add(self, spec: Spec) -> None:
        """Add one prefill and one decode replica of another revision."""
        self.cluster.launch = replace(self.cluster.launch, spec=spec)
        self.specs.append(spec)
        self.share(0.0)  # no traffic until the test assigns a share
        self.replicas.append([await self.cluster.add(role) for role in Role])

    def share(self, share: float, *, takes_more: bool = False) -> None:
        """Set the second revision's share of the requests."""
        self._version += 1
        old, new = (
            Revision(
                number=number,
                share=part,
                takes_more=number == 1 or takes_more,
                tokens=tokens_of(spec),
                kind=kind_of(spec),
                replicas=self.ids(number),
            )
            for number, part, spec in zip((1, 2), (1 - share, share), self.specs, strict=True)
        )
        self.cluster.core.revisions.take(RevisionTable(version=self._version, revisions=(old, new)))

    def ids(self, number: int) -> frozenset[str]:
        return (
            frozenset(replica.id for replica in self.replicas[number - 1])
            if number <= len(self.replicas)
            else frozenset()
        )

    def of(self, answer: Answer) -> set[int]:
        """Return the revisions whose replicas served the answer."""
        route = {answer.route.prefill_replica, answer.route.decode_replica}
        return {number for number in (1, 2) if route & self.ids(number)}

    async def until_tokens(self, number: int, num_tokens: int) -> None:
        """Wait until that many more requests have been decoded on a revision."""
        decode = self.cluster.seen(self.replicas[number - 1][1])
        enough = decode.status.totals.generated_tokens + num_tokens
        await self.cluster.until(lambda: decode.status.totals.generated_tokens >= enough)

    async def ask(self, inputs: Sequence[list[int]], *, turn: str) -> list[Answer]:
        return list(
            await asyncio.gather(
                *(self.cluster.generate(prompt, _GREEDY, id=f"{turn}-{i}") for i, prompt in enumerate(inputs))
            )
        )


async def test_each_answer_comes_from_one_revision_while_the_old_one_drains(lab: Lab) -> None:
    """Their KV layouts differ, so running requests cannot migrate and finish where they started."""
    inputs = prompts(*range(40, 56))
    async with lab.own(lab.checkpoint("llama"), **_DETERMINISTIC) as cluster:
        both = _Revisions(cluster)
        await both.add(updated(cluster.spec, {"kv": {"pool_dtype": "int8"}}, is_whole=False))
        old = await both.ask(inputs, turn="old")
        both.share(1.0)
        new = await both.ask(inputs, turn="new")
        assert [both.of(answer) for answer in (*old, *new)] == [{1}] * 16 + [{2}] * 16
        assert [answer.ids for answer in old] != [answer.ids for answer in new]
        both.share(0.5)
        running = asyncio.create_task(both.ask(inputs, turn="both"))
        await both.until_tokens(1, 10)
        await asyncio.gather(*(cluster.drain(replica) for replica in both.replicas[0]))
        answers = await running
        assert {number for answer in answers for number in both.of(answer)} == {1, 2}
        for i, answer in enumerate(answers):
            assert len(both.of(answer)) == 1
            assert answer.ids == (old, new)[both.of(answer).pop() - 1][i].ids


async def test_running_answers_move_to_a_new_revision_that_gives_the_same_tokens(lab: Lab) -> None:
    inputs = prompts(*range(40, 48))
    async with lab.own(lab.checkpoint("llama"), **exact_tree(1, 1)) as cluster:
        both = _Revisions(cluster)
        expected = [answer.ids for answer in await both.ask(inputs, turn="before")]
        await both.add(updated(cluster.spec, {"decode": {"max_running": 32}}, is_whole=False))
        running = asyncio.create_task(both.ask(inputs, turn="old"))
        await both.until_tokens(1, 10)
        both.share(1.0, takes_more=True)
        await asyncio.gather(*(cluster.drain(replica) for replica in both.replicas[0]))
        answers = await running
        assert [answer.ids for answer in answers] == expected
        assert any(answer.route.decode_replica in both.ids(2) for answer in answers)


async def test_a_canary_that_fails_costs_no_request_and_is_counted(lab: Lab) -> None:
    inputs = prompts(*range(40, 64))
    async with lab.own(lab.checkpoint("llama"), **exact_tree(1, 1)) as cluster:
        both = _Revisions(cluster)
        expected = [answer.ids for answer in await both.ask(inputs, turn="before")]
        await both.add(updated(cluster.spec, {"decode": {"max_running": 32}}, is_whole=False))
        both.share(1.0)
        running = asyncio.create_task(both.ask(inputs, turn="new"))
        await both.until_tokens(2, 10)
        for role in Role:
            await asyncio.to_thread(cluster.pools[role].pop().ranks[0].stop)
        assert [answer.ids for answer in await running] == expected
        counts = cluster.core.revisions.counts
        assert counts[2].failed >= 4 and not counts[1].failed
        problem = problem_of(counts[1], counts[2], max_error_increase=0.1, max_latency_factor=None)
        assert problem.endswith("on the old one")
