"""GPU deployment with lower tiers and prefix fetches between replicas.

The same on a CPU, where it is slow and says that the test is right.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from core.types.request import Role, Sampling
from router.routing.policy import Option
from tests.e2e.conftest import Checkpoint, Reference, exact_tree, gib_of_blocks, on_device
from tests.e2e.test_tiers import FakePolicy
from tests.engine.steps import prompts
from tests.support.local_cluster import Answer, LocalCluster, local_cluster
from tests.support.waiting import WITHIN_S

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.parametrize(
        "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
    ),
]

_GREEDY = Sampling(max_tokens=24, temperature=0.0)
_PROMPTS = prompts(100, 100, 100, 100)  # six full blocks each; the pool has room for two prompts


@pytest.mark.parametrize(("host", "disk"), [(60, 0), (5, 60), (0, 60)], ids=["host", "host and disk", "disk"])
def test_evicted_blocks_are_reloaded_and_served_to_a_peer(
    checkpoint: Checkpoint, reference: Reference, redis_url: str, tmp_path: Path, host: int, disk: int, device: str
) -> None:
    """host, disk: capacities in blocks."""
    model_dir, policy, tree = checkpoint("llama"), FakePolicy(), on_device(device, exact_tree(2, 1))
    tiers = {"kv_host_gib": _room(host), "kv_disk_gib": _room(disk), "kv_disk_path": str(tmp_path)}
    tree["prefill"] |= {"kv_memory_gib": _room(14), **tiers}
    expected = _expected(reference, model_dir, _PROMPTS, device)

    async def play() -> None:
        async with local_cluster(model_dir, redis_url, processes=True, policy=policy, **tree) as cluster:
            prefix_source, peer = (replica.id for replica in cluster.pools[Role.PREFILL])
            here = Option(prefill=prefix_source, decode=cluster.pools[Role.DECODE][0].id)
            for prompt, tokens in zip(_PROMPTS, expected, strict=True):
                assert (await _ask(cluster, policy, prompt, here)).ids == tokens
            again = await _ask(cluster, policy, _PROMPTS[0], here)
            assert (again.ids, _reused(again)) == (expected[0], (96, 0))
            await cluster.idle()
            totals = cluster.seen(cluster.pools[Role.PREFILL][0]).status.totals
            assert totals.host_hit_tokens + totals.disk_hit_tokens == 96 and totals.tier_losses == 0
            assert (bool(totals.host_saved_bytes), bool(totals.disk_hit_tokens)) == (bool(host), bool(disk))
            there = Option(prefill=peer, decode=here.decode, fetch_from=prefix_source, fetch_tokens=96)
            fetched = await _ask(cluster, policy, _PROMPTS[1], there)
            assert (fetched.ids, _reused(fetched)) == (expected[1], (0, 96))

    asyncio.run(play())


def test_answer_of_one_turn_is_fetched_for_the_next(
    checkpoint: Checkpoint, reference: Reference, redis_url: str, device: str
) -> None:
    """The prefix moves from a decode replica to a prefill replica, to another decode replica, and back."""
    model_dir, policy, tree = checkpoint("llama"), FakePolicy(), on_device(device, exact_tree(1, 2))
    turns, expected = [prompts(20)[0]], list[list[int]]()
    for _ in range(3):
        expected += _expected(reference, model_dir, turns[-1:], device)
        turns.append(turns[-1] + expected[-1] + prompts(8)[0])

    async def play() -> None:
        async with local_cluster(model_dir, redis_url, processes=True, policy=policy, **tree) as cluster:
            prefill, first, second = (replica.id for role in Role for replica in cluster.pools[role])
            ways = [
                Option(prefill=prefill, decode=first),
                Option(prefill=prefill, decode=second, fetch_from=first, fetch_tokens=len(turns[1])),
                Option(prefill=None, decode=first, fetch_from=second, fetch_tokens=len(turns[2])),
            ]
            answers = [await _ask(cluster, policy, turn, way) for turn, way in zip(turns, ways, strict=False)]
            assert [answer.ids for answer in answers] == expected
            # There are 43 positions after the first turn, 75 after the second. The prefill replica had one block, the
            # first decode replica two.
            assert [_reused(answer) for answer in answers] == [(0, 0), (16, 16), (32, 32)]

    asyncio.run(play())


def _room(num_blocks: int) -> float:
    return gib_of_blocks(num_blocks) if num_blocks else 0.0


def _expected(reference: Reference, model_dir: Path, inputs: list[list[int]], device: str) -> list[list[int]]:
    return reference.ids(model_dir, inputs, _GREEDY, device=device)


async def _ask(cluster: LocalCluster, policy: FakePolicy, prompt: list[int], way: Option) -> Answer:
    policy.option = way
    async with asyncio.timeout(WITHIN_S):
        return await cluster.generate(prompt, _GREEDY)


def _reused(answer: Answer) -> tuple[int, int]:
    """Return the numbers of cached and of fetched tokens."""
    return answer.route.cached_tokens, answer.route.fetched_tokens
