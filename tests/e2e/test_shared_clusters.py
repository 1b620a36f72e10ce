"""What a test leaves in a shared cluster fails this test, and not the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.types.request import Sampling
from engine.kv.block_manager import BlockManager
from tests.e2e.conftest import Lab, exact_tree
from tests.engine.steps import prompts
from tests.support.redis_at import redis_at
from tests.support.shared_clusters import SharedClusters

_GREEDY = Sampling(max_tokens=20, temperature=0.0)


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[SharedClusters]:
    with redis_at("127.0.0.1", tmp_path) as url:
        made = SharedClusters(url, settle_s=0.3)
        yield made
        made.close()


@pytest.mark.parametrize("fault", ["a lost block", "a running request", "unlike tables"])
async def test_a_cluster_that_is_not_whole_is_thrown_away(
    lab: Lab, clusters: SharedClusters, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    model_dir, [prompt], free, left = (
        lab.checkpoint("llama"),
        prompts(40),
        BlockManager.free,
        set[asyncio.Task[object]](),
    )
    with pytest.raises(AssertionError):
        async with clusters(model_dir, **exact_tree(1, 1)) as cluster:
            match fault:
                case "a lost block":
                    monkeypatch.setattr(BlockManager, "free", lambda blocks, table: free(blocks, table[1:]))
                case "a running request":
                    long = Sampling(max_tokens=80, temperature=0.0)
                    left |= {asyncio.create_task(cluster.generate_all([prompt] * 50, long))}
                case "unlike tables":
                    monkeypatch.setattr(BlockManager, "check_integrity", _disagree)
            await cluster.generate(prompt, _GREEDY)
    for task in left:
        task.cancel()
    monkeypatch.undo()
    used = [cluster]
    for _ in range(2):
        async with clusters(model_dir, **exact_tree(1, 1)) as cluster:
            used.append(cluster)
            answer = await cluster.generate(prompt, _GREEDY)
            assert (answer.route.cached_tokens, answer.route.blocks_shipped) == (0, 3), "nothing is cached"
    assert used[0] is not used[1] is used[2]


def _disagree(blocks: BlockManager) -> None:
    raise AssertionError("hash tables disagree")


async def test_the_least_recently_used_one_ends(lab: Lab, clusters: SharedClusters) -> None:
    model_dir, used = lab.checkpoint("llama"), []
    for num_rows in (1, 2, 3, 1, 4, 1, 2):
        tree = exact_tree(0, 1)
        tree["decode"] |= {"max_running": num_rows}
        async with clusters(model_dir, **tree) as cluster:
            used.append(cluster)
    assert used[0] is used[3] is used[5] and used[1] is not used[6]
