"""Prefix reuse of models with recurrent layers: prefix hits end at the last state checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.index.prefix_index import NOTHING
from core.types.prefix_hash import block_hashes, checkpoint_hash, root_hash
from core.types.request import Role, Sampling
from engine.config import GIB, EngineConfig
from router.routing.candidates import Option
from tests.e2e.conftest import Lab, exact_tree
from tests.engine.steps import prompts
from tests.engine.tiny_models import DELTA_NET
from tests.support.fake_policy import FakePolicy
from tests.support.grids import quick
from tests.support.local_cluster import LocalCluster
from tests.support.waiting import becomes

_GREEDY = Sampling(max_tokens=20, temperature=0.0)
_MODEL = ("qwen3_5", DELTA_NET | {"initializer_range": 0.3})


async def test_prefix_hits_end_at_the_last_checkpoint(lab: Lab) -> None:
    model_dir = lab.checkpoint(_MODEL[0], **_MODEL[1])
    system, first, second, third = prompts(50, 33, 34, 35)
    inputs = [system + first, system + second, system + third]
    async with lab.own(model_dir, **exact_tree(1, 1)) as cluster:
        answers = [await cluster.generate(tokens, _GREEDY) for tokens in inputs]
        next_turn = inputs[0] + answers[0].ids + prompts(9)[0]
        answers.append(await cluster.generate(next_turn, _GREEDY))
        expected = lab.reference(model_dir, [*inputs, next_turn], _GREEDY)
        assert [answer.ids for answer in answers] == [[token.token_id for token in tokens] for tokens in expected]
        # The second prompt finds the blocks of the system prompt without a checkpoint, and makes one there.
        assert [answer.route.cached_tokens for answer in answers] == [0, 0, 48, 80]
        computed = cluster.seen(cluster.pools[Role.PREFILL][0]).status.totals.computed_tokens
        assert computed == sum(map(len, (*inputs, next_turn))) - 48 - 80
        await cluster.idle()
        # Routers know the same checkpoints: after the shared prefix, and after the last full block of each prompt.
        for tokens in (system, *inputs, next_turn):
            hashes = block_hashes(root_hash(cluster.model), tokens, block_size=16)
            await _listed(cluster, hashes, num_blocks=(len(tokens) - 1) // 16)


async def _listed(cluster: LocalCluster, hashes: list[bytes], *, num_blocks: int) -> None:
    """Wait until the router's index lists a checkpoint after this many blocks, and none later."""
    index = cluster.replicas.index
    checkpoints = [checkpoint_hash(prefix_hash) for prefix_hash in hashes]

    def listed() -> int:
        found = index.depths_to_checkpoints(hashes, checkpoints, among={"prefill-0": 1})
        return found.get("prefill-0", NOTHING).device

    await becomes(lambda: listed() == num_blocks)


async def test_checkpoints_of_answers_are_fetched(lab: Lab) -> None:
    """A prefill replica fetches a checkpoint that a decode replica made in its answer."""
    model_dir = lab.checkpoint(_MODEL[0], **_MODEL[1])
    (prompt,) = prompts(50)
    long = Sampling(max_tokens=40, temperature=0.0)
    policy = FakePolicy()
    policy.ways[len(prompt)] = [Option(prefill="prefill-0", decode="decode-1")]
    tree = exact_tree(1, 1)
    tree["kv"] |= {"checkpoint_tokens": 16}
    async with lab.own(model_dir, policy=policy, **tree) as cluster:
        answer = await cluster.generate(prompt, long)
        next_turn = prompt + answer.ids + [5, 6, 7]
        policy.ways[len(next_turn)] = [
            Option(prefill="prefill-0", decode="decode-1", fetch_from="decode-1", fetch_tokens=80)
        ]
        again = await cluster.generate(next_turn, _GREEDY)
        assert [again.ids] == lab.reference.ids(model_dir, [next_turn], _GREEDY)
        assert (again.route.cached_tokens, again.route.fetched_tokens) == (48, 32), "80 tokens have a checkpoint"


def _small_pools(model_dir: Path, *, tp: int, prefill: int = 1, host: bool = True) -> dict[str, Any]:
    """Return a spec whose prefill replicas have room for two prompts and two states, and for all below."""
    layout = EngineConfig(model_dir=model_dir, dtype="float32").layout(tensor_parallel=tp)
    below = 4 * (6 + layout.num_pieces + 1) * layout.block_bytes / GIB
    tree = exact_tree(prefill, 1)
    tree["prefill"] |= {
        "tensor_parallel": tp,
        "max_running": 1,
        "kv_memory_gib": (14.5 * layout.block_bytes + 2 * layout.state_bytes) / GIB,
        "kv_host_gib" if host else "kv_disk_gib": below,
    }
    return tree


@pytest.mark.parametrize(("tp", "host"), quick([(1, True), (2, False)], [(1, True)]))
async def test_evicted_states_return_from_lower_tiers_and_are_served_to_a_peer(
    tp: int, host: bool, lab: Lab, tmp_path: Path
) -> None:
    model_dir, inputs = lab.checkpoint(_MODEL[0], **_MODEL[1]), prompts(100, 100, 100, 100)
    policy = FakePolicy(here := Option(prefill="prefill-0", decode="decode-2"))
    tree = _small_pools(model_dir, tp=tp, prefill=2, host=host)
    tree["prefill"]["kv_disk_path"] = str(tmp_path)
    expected = lab.reference.ids(model_dir, inputs, _GREEDY)
    async with lab.own(model_dir, policy=policy, **tree) as cluster:
        for _ in range(2):
            answers = [await cluster.generate(tokens, _GREEDY) for tokens in inputs]
            assert [answer.ids for answer in answers] == expected
        assert [answer.route.cached_tokens for answer in answers] == [96] * 4
        policy.default = [replace(here, prefill="prefill-1", fetch_from="prefill-0", fetch_tokens=96)]
        fetched = await cluster.generate(inputs[0], _GREEDY)
        assert fetched.ids == expected[0] and fetched.route.fetched_tokens == 96


async def test_evicted_states_return_to_replicas_that_do_both(lab: Lab) -> None:
    """The blocks stay on the device: only the states are loaded."""
    model_dir = lab.checkpoint(_MODEL[0], **_MODEL[1])
    inputs = prompts(100, 101, 102)
    tree = _small_pools(model_dir, tp=1)
    size = {key: tree["prefill"][key] for key in ("max_running", "kv_memory_gib", "kv_host_gib")}
    tree = exact_tree(0, 1)
    tree["decode"] |= size | {"kv_memory_gib": 3 * size["kv_memory_gib"]}
    expected = lab.reference.ids(model_dir, inputs, _GREEDY)
    async with lab.own(model_dir, **tree) as cluster:
        for _ in range(2):
            answers = [await cluster.generate(tokens, _GREEDY) for tokens in inputs]
            assert [answer.ids for answer in answers] == expected
        await cluster.idle()
        seen = cluster.seen(cluster.pools[Role.DECODE][0])
        await cluster.until(lambda: seen.status.totals.generated_tokens == 6 * 20)
        assert seen.status.totals.computed_tokens == 2 * (100 + 101 + 102) - 3 * 96
