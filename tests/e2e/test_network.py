"""Two hosts whose network is cut while both are alive, or is slow and loses packets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.types.request import Role, Sampling
from router.routing.candidates import Option
from tests.e2e.conftest import Lab, exact_tree
from tests.engine.steps import prompts
from tests.support import hosts
from tests.support.fake_policy import FakePolicy
from tests.support.grids import quick
from tests.support.hosts import Cable
from tests.support.local_cluster import local_cluster
from tests.support.rank_in_process import shared_ceiling
from tests.support.redis_at import redis_at
from tests.support.slow_cable import Slowness
from tests.support.waiting import becomes

pytestmark = pytest.mark.skipif(not hosts.can_be_made(), reason="needs root, to make network namespaces")

_SLOW = Slowness(delay_s=0.02, loss=0.01, bytes_per_s=100e6 / 8)
_WIDE = {"head_dim": 256, "num_key_value_heads": 4, "num_hidden_layers": 6}  # 48 KiB a token, as real models have


@pytest.fixture
def cable() -> Iterator[Cable]:
    with hosts.cable() as made:
        yield made


@pytest.fixture
def slow_cable() -> Iterator[Cable]:
    with hosts.cable(_SLOW) as made:
        yield made


@pytest.mark.parametrize("role", quick(Role, [Role.DECODE]))
async def test_streams_continue_and_the_far_side_returns_empty(
    role: Role, cable: Cable, lab: Lab, tmp_path: Path
) -> None:
    """Redis is on the near side, so that the far side is cut off from it, too."""
    model_dir, inputs, greedy = (
        lab.checkpoint("llama"),
        prompts(20, 33, 47, 70),
        Sampling(max_tokens=400, temperature=0.0),
    )
    running_on, policy, tree = shared_ceiling(100), FakePolicy(), exact_tree(0, 0)
    for pool in Role:
        tree[pool] |= {"kv_memory_gib": 0.02}
    expected = lab.reference.ids(model_dir, inputs, greedy)
    with redis_at(cable.near.address, tmp_path) as near_redis:
        async with local_cluster(model_dir, near_redis, processes=True, policy=policy, **tree) as cluster:
            adding = [cluster.add(each, ceiling=running_on, on=cable.near) for each in Role]
            far, *near = await asyncio.gather(cluster.add(role, ceiling=running_on, on=cable.far), *adding)
            ids = dict(zip(Role, (replica.id for replica in near), strict=True))
            here, there = (
                Option(prefill=each[Role.PREFILL], decode=each[Role.DECODE]) for each in (ids, ids | {role: far.id})
            )
            policy.default = [here]  # also of requests that go on elsewhere, which are longer
            policy.ways = {len(prompt): [there, here] for prompt in inputs[:2]}
            running = asyncio.create_task(cluster.generate_all(inputs, greedy))
            await becomes(lambda: far.ranks[0].status()["running"])
            cable.cut()
            running_on.lift()
            answers = await running
            assert [answer.ids for answer in answers] == expected
            # After three seconds of silence it is dropped, whether it was in use or not.
            await cluster.until(lambda: not (seen := cluster.replicas.get(far.id)) or not seen.is_usable)
            cable.mend()
            await cluster.until(lambda: (again := cluster.replicas.get(far.id)) and again.is_usable)
            await cluster.idle()
            assert (await cluster.generate(inputs[0], greedy)).ids == answers[0].ids


@pytest.mark.slow
async def test_answers_are_the_same_and_the_policy_learns_which_way_is_slow(
    slow_cable: Cable, lab: Lab, tmp_path: Path
) -> None:
    model_dir, inputs = lab.checkpoint("llama", **_WIDE), prompts(*range(64, 72))
    greedy, tree = Sampling(temperature=0.0, max_tokens=40), exact_tree(0, 0)
    for pool in Role:
        tree[pool] |= {"kv_memory_gib": 0.1}
    expected = lab.reference.ids(model_dir, inputs, greedy)
    with redis_at(slow_cable.near.address, tmp_path) as url:
        async with local_cluster(model_dir, url, processes=True, **tree) as cluster:
            far, near, _ = await asyncio.gather(
                cluster.add(Role.PREFILL, on=slow_cable.far),
                cluster.add(Role.PREFILL, on=slow_cable.near),
                cluster.add(Role.DECODE, on=slow_cable.near),
            )
            answers = await cluster.generate_all(inputs, greedy)
            assert [answer.ids for answer in answers] == expected
            assert {answer.route.attempts for answer in answers} == {1}, "slow is not lost"
            await cluster.until(lambda: all(cluster.seen(p).load().link_bytes_per_s for p in (far, near)))
            slow, fast = (cluster.seen(replica).load().link_bytes_per_s for replica in (far, near))
            assert slow < fast / 2
            print(f"learnt: {slow / 1e6:.1f} and {fast / 1e6:.1f} MB/s")
