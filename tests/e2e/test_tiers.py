"""Lower tiers: evicted blocks return from memory and disk, intact or not at all, with unchanged tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import redis

from core.index.prefix_index import Depths
from core.types.prefix_hash import block_hashes, root_hash
from core.types.request import Role, Sampling
from router.routing.candidates import Option
from router.serving.replicas import Replica
from tests.e2e.conftest import Lab, exact_tree, on_device
from tests.engine.steps import prompts
from tests.support.disks import hang_disk
from tests.support.fake_policy import FakePolicy
from tests.support.grids import quick
from tests.support.local_cluster import LocalCluster, LocalReplica
from tests.support.waiting import becomes

_GREEDY = Sampling(max_tokens=8, temperature=0.0)
_BLOCK = 3 * 2 * 2 * 16 * 4 * 16 / 2**30  # GiB of the random model, one rank
_PROMPTS = prompts(100, 100, 100, 100)  # six full blocks each; the pool has room for two prompts


def _tree(
    path: Path, *, host: int = 0, disk: int = 0, tp: int = 1, prefill: int = 1, small: Iterable[Role] = (Role.PREFILL,)
) -> dict[str, Any]:
    """small: roles with a small pool and lower tiers."""
    tree = exact_tree(prefill, 1, tp=(tp, 1))
    tiers = {"kv_host_gib": host * _BLOCK / tp, "kv_disk_gib": disk * _BLOCK / tp, "kv_disk_path": str(path)}
    for role in small:
        tree[role] |= {"kv_memory_gib": 14.1 * _BLOCK / tp, "max_batch_tokens": 512, **tiers}
    return tree


def _prefill(cluster: LocalCluster) -> Replica:
    found = cluster.replicas.get(cluster.pools[Role.PREFILL][-1].id)
    assert found
    return found


async def _ask_all(cluster: LocalCluster, expected: list[list[int]]) -> None:
    for prompt, tokens in zip(_PROMPTS, expected, strict=True):
        assert (await cluster.generate(prompt, _GREEDY)).ids == tokens


async def _stop(cluster: LocalCluster, replica: LocalReplica) -> None:
    for rank in replica.ranks:
        await asyncio.to_thread(rank.stop)
    cluster.pools[Role.PREFILL].remove(replica)
    await becomes(lambda: cluster.replicas.get(replica.id) is None)


_TIERS = {"host": (60, 0), "disk": (0, 60), "both": (5, 60)}  # capacities in blocks


@pytest.mark.parametrize(
    ("tp", "tiers", "device"),
    [
        *quick(product((1, 2), _TIERS, ["cpu"]), [(1, "host", "cpu"), (1, "disk", "cpu"), (2, "both", "cpu")]),
        *(pytest.param(1, tiers, "cuda", marks=pytest.mark.gpu) for tiers in _TIERS),
    ],
)
async def test_evicted_blocks_are_reloaded_and_served_to_a_peer(
    lab: Lab, tmp_path: Path, tp: int, tiers: str, device: str
) -> None:
    model_dir, (host, disk) = lab.checkpoint("llama"), _TIERS[tiers]
    policy = FakePolicy(here := Option(prefill="prefill-0", decode="decode-2"))
    expected = lab.reference.ids(model_dir, _PROMPTS, _GREEDY, device=device)
    tree = on_device(device, _tree(tmp_path, host=host, disk=disk, tp=tp, prefill=2))
    async with lab.own(model_dir, processes=device == "cuda", policy=policy, **tree) as cluster:
        await _ask_all(cluster, expected)
        again = await cluster.generate(_PROMPTS[0], _GREEDY)
        assert (again.ids, again.route.cached_tokens, again.route.fetched_tokens) == (expected[0], 96, 0)
        await cluster.idle()
        totals = cluster.totals(Role.PREFILL)
        assert totals.host_hit_tokens + totals.disk_hit_tokens == 96 and totals.tier_losses == 0
        assert (bool(totals.host_saved_bytes), bool(totals.disk_hit_tokens)) == (bool(host), bool(disk))
        policy.default = [replace(here, prefill="prefill-1", fetch_from="prefill-0", fetch_tokens=96)]
        fetched = await cluster.generate(_PROMPTS[1], _GREEDY)
        assert (fetched.ids, fetched.route.cached_tokens, fetched.route.fetched_tokens) == (expected[1], 0, 96)


async def test_router_index_has_the_tier_of_each_block(lab: Lab, tmp_path: Path) -> None:
    model_dir = lab.checkpoint("llama")
    expected = lab.reference.ids(model_dir, _PROMPTS, _GREEDY)
    async with lab.own(model_dir, **_tree(tmp_path, host=60)) as cluster:
        await _ask_all(cluster, expected)
        hashes = block_hashes(root_hash(cluster.model), _PROMPTS[0], block_size=16)
        index, replica = cluster.replicas.index, _prefill(cluster).id
        await becomes(lambda: index.depths(hashes).get(replica) == Depths(0, 6, 6))
        redis.Redis.from_url(lab.redis_url).flushdb()
        await cluster.generate(_PROMPTS[0], _GREEDY)
        await becomes(lambda: index.depths(hashes).get(replica) == Depths(6, 6, 6))


async def test_lower_tiers_survive_a_role_switch(lab: Lab, tmp_path: Path) -> None:
    model_dir = lab.checkpoint("llama")
    expected, tree = lab.reference.ids(model_dir, _PROMPTS, _GREEDY), _tree(tmp_path, host=5, disk=60, small=Role)
    async with lab.own(model_dir, **tree) as cluster:
        await _ask_all(cluster, expected)
        [prefill], [decode] = cluster.pools[Role.PREFILL], cluster.pools[Role.DECODE]
        successor = await cluster.switch(prefill)
        cluster.pools[Role.DECODE].remove(decode)
        await asyncio.to_thread(decode.ranks[0].stop)
        await becomes(lambda: cluster.replicas.get(decode.id) is None)
        again = await cluster.generate(_PROMPTS[0], _GREEDY)
        assert (again.ids, again.route.decode_replica) == (expected[0], successor.id)
        await cluster.idle()
        seen = cluster.seen(successor)
        await cluster.until(lambda: seen.status.totals.generated_tokens == len(expected[0]))
        assert (seen.status.totals.computed_tokens, seen.status.totals.disk_hit_tokens) == (100 - 96, 96)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:500])


@pytest.mark.parametrize(
    ("tp", "harm"), quick(product((1, 2), (_flip, _cut, Path.unlink)), [(2, _flip), (1, _cut), (1, Path.unlink)])
)
async def test_a_block_that_is_harmed_is_computed_again(
    lab: Lab, tmp_path: Path, tp: int, harm: Callable[[Path], None]
) -> None:
    model_dir = lab.checkpoint("llama")
    expected = lab.reference.ids(model_dir, _PROMPTS, _GREEDY)
    async with lab.own(model_dir, **_tree(tmp_path, disk=60, tp=tp)) as cluster:
        await _ask_all(cluster, expected)
        of_last_rank = tmp_path / "cluster" / "prefill" / cluster.pools[Role.PREFILL][0].id / f"rank-{tp - 1}"
        await becomes(lambda: len([*of_last_rank.glob("*.kv")]) >= 10)
        await cluster.idle()
        for path in of_last_rank.glob("*.kv"):
            harm(path)
        again = await cluster.generate(_PROMPTS[0], _GREEDY)
        assert (again.ids, again.route.cached_tokens) == (expected[0], 0)
        await cluster.idle()
        await becomes(lambda: _prefill(cluster).status.totals.tier_losses > 0)
        assert _prefill(cluster).status.totals.disk_hit_tokens == 0


async def test_replica_adopts_the_disk_tier_of_an_ended_one(lab: Lab, tmp_path: Path) -> None:
    model_dir = lab.checkpoint("llama")
    expected = lab.reference.ids(model_dir, _PROMPTS, _GREEDY)
    async with lab.own(model_dir, **_tree(tmp_path, disk=60)) as cluster:
        await _ask_all(cluster, expected)
        await cluster.idle()
        await _stop(cluster, cluster.pools[Role.PREFILL][0])
        await cluster.add(Role.PREFILL)
        await becomes(lambda: _prefill(cluster).status.blocks_disk >= 20)
        answer = await cluster.generate(_PROMPTS[3], _GREEDY)
        assert (answer.ids, answer.route.cached_tokens) == (expected[3], 96)


async def test_replicas_on_one_node_keep_their_blocks_apart(lab: Lab, tmp_path: Path) -> None:
    model_dir = lab.checkpoint("llama")
    expected = lab.reference.ids(model_dir, _PROMPTS, _GREEDY)
    async with lab.own(model_dir, **_tree(tmp_path, disk=60, prefill=2)) as cluster:
        for _ in range(2):
            await _ask_all(cluster, expected)
        await cluster.idle()
        assert len([path for path in (tmp_path / "cluster" / "prefill").iterdir() if path.is_dir()]) == 2
        assert all(replica.status.totals.tier_losses == 0 for replica in cluster.replicas)


async def test_decode_replica_that_computes_prompts_loads_from_tiers(lab: Lab, tmp_path: Path) -> None:
    model_dir = lab.checkpoint("llama")
    expected = lab.reference.ids(model_dir, _PROMPTS, _GREEDY)
    tree = _tree(tmp_path, host=5, disk=60, prefill=0, small=[Role.DECODE])
    async with lab.own(model_dir, **tree) as cluster:
        await _ask_all(cluster, expected)
        again = await cluster.generate(_PROMPTS[0], _GREEDY)
        assert again.ids == expected[0]
        await cluster.idle()
        [decode] = cluster.replicas
        totals = decode.status.totals
        assert totals.host_hit_tokens + totals.disk_hit_tokens == 96 and totals.tier_losses == 0


async def test_a_disk_that_hangs_is_not_waited_for(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = lab.checkpoint("llama")
    expected = lab.reference.ids(model_dir, _PROMPTS, _GREEDY)
    async with lab.own(model_dir, **_tree(tmp_path, disk=60), timeouts={"transfer_s": 1.0}) as cluster:
        await _ask_all(cluster, expected)
        goes_on = hang_disk(monkeypatch)
        again = await cluster.generate(_PROMPTS[0], _GREEDY)
        assert (again.ids, again.route.cached_tokens) == (expected[0], 0)
        [blocks] = [replica.blocks for replica in cluster.pools[Role.PREFILL]]
        assert blocks["free"] + blocks["cached"] == blocks["total"] - 6, "what the disk may still write to is kept away"
        goes_on.set()


async def test_client_that_disconnects_during_a_tier_load_frees_everything(lab: Lab, tmp_path: Path) -> None:
    model_dir = lab.checkpoint("llama")
    expected = lab.reference.ids(model_dir, _PROMPTS, _GREEDY)
    async with lab.own(model_dir, **_tree(tmp_path, disk=60)) as cluster:
        await _ask_all(cluster, expected)
        for patience_s in (0.001, 0.003, 0.01, 0.02):
            for prompt in _PROMPTS:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(patience_s):
                        await cluster.generate(prompt, _GREEDY)
                        raise TimeoutError  # the load was faster than the client's cancellation
        await cluster.idle()
        await _ask_all(cluster, expected)
