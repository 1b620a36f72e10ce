"""Prefixes that are fetched from whoever holds them, instead of computed: the tokens are those of one process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from cluster.request import Role, Sampling
from router.policy import Demand, Option, ReplicaView
from tests.e2e.conftest import Checkpoint, Reference
from tests.engine.steps import prompts
from tests.local_cluster import Answer, LocalCluster, local_cluster

_GREEDY = Sampling(max_tokens=24, temperature=0.0)


class FakePolicy:
    """Sends every request where the test says, whatever it costs."""

    def __init__(self) -> None:
        self.prefill: str | None = None
        self.decode = ""
        self.pull_from: str | None = None
        self.pull_tokens: int | None = None  # None: as many as the router believes

    def options(
        self, demand: Demand, prefills: Sequence[ReplicaView], decodes: Sequence[ReplicaView]
    ) -> Sequence[Option]:
        known = {view.replica: view.cached_tokens for view in (*prefills, *decodes)}
        tokens = known.get(self.pull_from or "", 0) if self.pull_tokens is None else self.pull_tokens
        return [Option(prefill=self.prefill, decode=self.decode, pull_from=self.pull_from, pull_tokens=tokens)]


def _tree(prefill: int, decode: int, *, tp: int = 1, **router: Any) -> dict[str, Any]:
    return {
        "model": {"dtype": "float32"},
        "kv": {"wire_dtype": "raw"},
        "prefill": {"replicas": prefill, "kv_memory_gib": 0.01, "max_batch_tokens": 32, "tensor_parallel": tp},
        "decode": {"replicas": decode, "kv_memory_gib": 0.01},
        "router": {"max_local_prefill": 0} | router,
    }


async def _indexed(cluster: LocalCluster, replica: str, num_tokens: int) -> None:
    """Wait until the router knows that this replica holds so many tokens' blocks more than none."""
    async with asyncio.timeout(10):
        while cluster.replicas.index.num_held(replica) * 16 < num_tokens:
            await asyncio.sleep(0.01)


async def _ask(cluster: LocalCluster, policy: FakePolicy, prompt: list[int], way: str) -> Answer:
    """way: "P > D", or "P < S > D" where S gives what P lacks; P may be missing."""
    left, _, policy.decode = way.replace(" ", "").rpartition(">")
    prefill, _, source = left.partition("<")
    policy.prefill, policy.pull_from = prefill or None, source or None
    return await cluster.generate(prompt, _GREEDY)


@pytest.mark.parametrize("tp", [1, 2])
async def test_a_prefix_is_pulled_from_another_prefill_replica(
    checkpoint: Checkpoint, reference: Reference, redis_url: str, tp: int
) -> None:
    model_dir, prompt, policy = checkpoint("llama"), prompts(70)[0], FakePolicy()
    longer = prompt + prompts(30)[0]
    expected = [[t.token_id for t in tokens] for tokens in reference(model_dir, [prompt, longer], _GREEDY)]
    async with local_cluster(model_dir, redis_url, policy=policy, **_tree(2, 2, tp=tp)) as cluster:
        (p0, p1), (d0, d1) = (sorted(r.id for r in cluster.pools[role]) for role in (Role.PREFILL, Role.DECODE))
        policy.pull_tokens = 64
        first = await _ask(cluster, policy, prompt, f"{p0} > {d0}")
        second = await _ask(cluster, policy, longer, f"{p1} < {p0} > {d1}")
        assert [first.ids, second.ids] == expected
        assert (second.route.cached_tokens, second.route.pulled_tokens) == (0, 64)
        totals = cluster.replicas.get(p1).status.totals
        assert (totals.pulls, totals.pulled_tokens, totals.pull_failures) == (1, 64, 0)
        assert totals.computed_tokens == 100 - 64
        await cluster.idle()
