"""Families with unlike layers in a cluster: the tokens of one process, on every path that moves their KV."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from core.types.failpoint import FailpointStage
from core.types.request import Role, Sampling
from engine.config import GIB, EngineConfig
from engine.timing.pace import Pace
from router.routing.candidates import Option
from router.routing.policies import RoundRobin
from tests.e2e.conftest import Lab, exact_tree
from tests.engine.model.test_models import FAMILIES
from tests.engine.steps import prompts
from tests.support.fake_policy import FakePolicy
from tests.support.local_cluster import LocalCluster, moved
from tests.support.long_answers import Ceiling
from tests.support.rank_in_process import Fault

_GREEDY = Sampling(max_tokens=24, temperature=0.0)
_SAMPLINGS = [_GREEDY, Sampling(max_tokens=24, temperature=1.0, seed=3)] * 3
_PROMPTS = prompts(5, 16, 33, 70, 47, 31)  # windows are of 9 tokens, chunks of 16, blocks of 16

# The families that differ most, on the paths that most depend on layers, run with the other tests.
_QUICK = ("gemma4", "gpt_oss", "minimax_m2")
_SLOW = (
    "gemma2",
    "gemma3",
    "gemma4, experts",
    "phi3",
    "glm4_moe",
    "glm4_moe_lite",
    "mistral4",
    "llama4",
    *(_RECURRENT := ("qwen3_5", "qwen3_next", "lfm2", "nemotron_h, experts", "granite_hybrid")),
    "deepseek_v32",
    "glm_moe_dsa",
)


@dataclass(frozen=True)
class World:
    """One model, and the answers of a single process."""

    lab: Lab
    model_dir: Path
    tmp_path: Path
    monkeypatch: pytest.MonkeyPatch

    def cluster(self, tree: dict[str, Any], **options: Any) -> Any:
        return self.lab.own(self.model_dir, **options, **tree)

    def expected(self, inputs: list[list[int]], samplings: Any = _GREEDY, **engine: Any) -> list[list[int]]:
        return self.lab.reference.ids(self.model_dir, inputs, samplings, **engine)

    def gib_of_blocks(self, number: float) -> float:
        """Return the size of a pool, or of a tier, for so many blocks of this model in float32."""
        layout = EngineConfig(model_dir=self.model_dir, dtype="float32").layout()
        return number * layout.block_bytes / GIB


async def _ask(cluster: LocalCluster) -> list[list[int]]:
    return [answer.ids for answer in await cluster.generate_all(_PROMPTS, _SAMPLINGS)]


async def _shipped(world: World, tree: dict[str, Any], **engine: Any) -> None:
    """Ask twice; the second time the prompts are cached."""
    expected = world.expected(_PROMPTS, _SAMPLINGS, **engine)
    async with world.cluster(tree) as cluster:
        assert await _ask(cluster) == expected
        assert await _ask(cluster) == expected


async def one_pair(world: World) -> None:
    await _shipped(world, exact_tree(1, 1))


async def two_ranks_to_one(world: World) -> None:
    await _shipped(world, exact_tree(1, 1, tp=(2, 1)))


async def two_pairs_of_one_rank_to_four(world: World) -> None:
    await _shipped(world, exact_tree(2, 2, tp=(1, 4)))


async def one_process(world: World) -> None:
    """The decode replica computes the prompts, too."""
    await _shipped(world, exact_tree(0, 1))


async def eight_bits(world: World) -> None:
    """Codes of an 8-bit pool cross an 8-bit wire unchanged."""
    tree = exact_tree(1, 1)
    tree["kv"] = {"wire_dtype": "fp8_e4m3", "pool_dtype": "fp8_e4m3"}
    await _shipped(world, tree, pool_dtype="fp8_e4m3")


async def drafts(world: World) -> None:
    world.monkeypatch.setattr(Pace, "timing", None)  # drafting must not depend on the machine's speed
    await _shipped(world, exact_tree(1, 1) | {"speculation": {"method": "ngram", "max_tokens": 5}})


async def fetched_prefix(world: World) -> None:
    """The second prefill replica fetches a prefix from the first one, and a decode replica from a decode replica."""
    prompt, policy = _PROMPTS[3], FakePolicy()
    longer = prompt + _PROMPTS[5]
    policy.ways = {
        len(prompt): [Option(prefill="prefill-0", decode="decode-2")],
        len(longer): [Option(prefill="prefill-1", decode="decode-3", fetch_from="prefill-0", fetch_tokens=64)],
    }
    async with world.cluster(exact_tree(2, 2), policy=policy) as cluster:
        answers = [await cluster.generate(each, _GREEDY) for each in (prompt, longer)]
        assert [answer.ids for answer in answers] == world.expected([prompt, longer])
        assert answers[1].route.fetched_tokens == 64


async def loaded_from_tiers(world: World) -> None:
    inputs = prompts(100, 100, 100, 100)  # six full blocks each; the pool has room for two prompts
    tree = exact_tree(1, 1)
    tree["prefill"] |= {"kv_memory_gib": world.gib_of_blocks(14.1), "kv_disk_path": str(world.tmp_path)}
    tree["prefill"] |= {"kv_host_gib": world.gib_of_blocks(5), "kv_disk_gib": world.gib_of_blocks(60)}
    sampling = Sampling(max_tokens=8, temperature=0.0)
    expected = world.expected(inputs, sampling)
    async with world.cluster(tree) as cluster:
        assert [(await cluster.generate(prompt, sampling)).ids for prompt in inputs] == expected
        again = await cluster.generate(inputs[0], sampling)
        assert (again.ids, again.route.cached_tokens) == (expected[0], 96)
        await cluster.idle()
        assert cluster.totals(Role.PREFILL).tier_losses == 0


async def preempted(world: World) -> None:
    inputs, sampling = prompts(33, 34, 35, 36, 37, 38), Sampling(max_tokens=60, temperature=0.0)
    tree = exact_tree(1, 1)
    tree["decode"]["kv_memory_gib"] = world.gib_of_blocks(20.5)
    expected = world.expected(inputs, sampling)
    async with world.cluster(tree) as cluster:
        cluster.core.reservations.finished([1] * 200)  # so short have answers been until now
        answers = await cluster.generate_all(inputs, sampling)
        assert [answer.ids for answer in answers] == expected
        await cluster.until(lambda: cluster.totals(Role.DECODE).preemptions)


async def migrated(world: World) -> None:
    ceiling = Ceiling(12)
    ceiling.arm(world.monkeypatch.setattr)
    async with world.cluster(exact_tree(1, 1)) as cluster:
        answer = await moved(cluster, cluster.generate(_PROMPTS[4], _GREEDY), ceiling)
        assert [answer.ids] == world.expected([_PROMPTS[4]])


async def switched_roles(world: World) -> None:
    expected = world.expected(_PROMPTS, _SAMPLINGS)
    async with world.cluster(exact_tree(2, 2), policy=RoundRobin()) as cluster:
        assert await _ask(cluster) == expected
        [prefill, _], [decode, _] = cluster.pools[Role.PREFILL], cluster.pools[Role.DECODE]
        await cluster.switch(decode)
        await cluster.switch(prefill)
        assert await _ask(cluster) == expected


async def lost_prefill_replica(world: World) -> None:
    await _killed(world, Role.PREFILL, Fault(FailpointStage.COMPUTING, nth=2))


async def lost_decode_replica(world: World) -> None:
    await _killed(world, Role.DECODE, Fault(FailpointStage.COMPUTING, nth=12))


async def _killed(world: World, role: Role, fault: Fault) -> None:
    tree = exact_tree(int(role is Role.DECODE), int(role is Role.PREFILL))
    expected = world.expected(_PROMPTS, _SAMPLINGS)
    async with world.cluster(tree, processes=True) as cluster:
        doomed = await cluster.add(role, fault)
        await cluster.add(role)
        assert await _ask(cluster) == expected
        assert doomed.has_been_hit, "the fault never happened"


_QUICK_PATHS = (two_ranks_to_one, fetched_prefix, migrated)
_SLOW_PATHS = (
    *(one_pair, two_pairs_of_one_rank_to_four, one_process, eight_bits, drafts, loaded_from_tiers, preempted),
    *(switched_roles, lost_prefill_replica, lost_decode_replica),
)


# Each of these families, and each of these paths, twice.
_BY_DEFAULT = {(family, path) for f, family in enumerate(_QUICK) for p, path in enumerate(_QUICK_PATHS) if (f + p) % 3}


def _cases() -> Iterator[Any]:
    for family in (*_QUICK, *_SLOW):
        for path in (*_QUICK_PATHS, *_SLOW_PATHS):
            # Deployments refuse lower tiers for models with recurrent layers.
            if path is loaded_from_tiers and family in _RECURRENT:
                continue
            marks = () if (family, path) in _BY_DEFAULT else pytest.mark.slow
            yield pytest.param(family, path, id=f"{family}-{path.__name__}".replace(", ", "_"), marks=marks)


@pytest.mark.parametrize(("family", "path"), list(_cases()))
async def test_tokens_equal_one_process(
    family: str, path: Callable[[World], Awaitable[None]], lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, changes = FAMILIES[family]
    # Weights large enough that a wrong state changes the tokens.
    model_dir = lab.checkpoint(architecture, **(changes | {"initializer_range": 0.3}))
    await path(World(lab, model_dir, tmp_path, monkeypatch))
