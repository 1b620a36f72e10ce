"""Branching drafts: answers of a deployment equal those of one process without drafts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.types.request import BRANCHES, Role, Sampling
from engine.config import EngineConfig
from engine.runner.runner import ModelRunner
from engine.scheduler.sequence import Sequence
from engine.spec_decode.speculation import Speculation
from engine.timing.pace import Pace
from tests.e2e.conftest import Checkpoint, exact_tree
from tests.engine.asked import AnswerText, Asked, Branching, answers
from tests.engine.steps import prompts
from tests.support.ceiling import Ceiling
from tests.support.local_cluster import LocalCluster, local_cluster, moved
from tests.support.waiting import WITHIN_S
from worker.migrations import Moves

_SAMPLED = Sampling(max_tokens=40, temperature=1.0, seed=3)
_SAMPLINGS = (
    _SAMPLED,
    replace(_SAMPLED, temperature=0.0),
    replace(_SAMPLED, temperature=0.7, presence_penalty=1.0, num_logprobs=1),
)
_ASKED = [
    Asked(prompt, sampling, num_choices=2) for prompt, sampling in zip(prompts(20, 33, 47), _SAMPLINGS, strict=True)
]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model_dir(checkpoint: Checkpoint) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> AnswerText:
    return answers(ModelRunner(EngineConfig(model_dir=model_dir, dtype="float32", kv_memory_gib=0.1)), _ASKED)


@pytest.fixture(autouse=True)
def drafts_branch(monkeypatch: pytest.MonkeyPatch, expected: AnswerText) -> None:
    """Every third token is right in a branch only, independent of the machine's speed."""

    def of(method: str, *, max_tokens: int, vocab_size: int, **others: Any) -> Speculation:
        tree = Branching(expected, _ASKED, every=3)
        return Speculation({method: tree}, max_tokens=max_tokens, vocab_size=vocab_size)

    monkeypatch.setattr(Speculation, "of", of)
    monkeypatch.setattr(Pace, "timing", None)


def _tree(*, tensor_parallel: int = 1) -> dict[str, Any]:
    tree = exact_tree(1, 1) | {"speculation": {"method": "suffix", "max_tokens": 5}}
    tree["decode"] |= {"tensor_parallel": tensor_parallel, "max_running": 64}
    return tree


async def _ask(cluster: LocalCluster) -> list[list[int]]:
    requests = [
        cluster.generate(one.prompt, one.sampling, id=str(i), n=one.num_choices) for i, one in enumerate(_ASKED)
    ]
    async with asyncio.timeout(WITHIN_S):
        found = await asyncio.gather(*requests)
    return [[token.token_id for token in tokens] for answer in found for tokens in answer.tokens.values()]


def _num_in_branches(cluster: LocalCluster) -> int:
    seen = [cluster.seen(replica) for replica in cluster.pools[Role.DECODE]]
    return sum(sum(one.accepted) for each in seen for one in each.status.totals.drafted if one.method == BRANCHES)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
async def test_on_one_pair(model_dir: Path, redis_url: str, expected: AnswerText, tensor_parallel: int) -> None:
    """With two ranks, rank 0 broadcasts the branches and the blocks to copy."""
    async with local_cluster(model_dir, redis_url, **_tree(tensor_parallel=tensor_parallel)) as cluster:
        assert await _ask(cluster) == expected.ids
        await cluster.idle()
        await cluster.until(lambda: _num_in_branches(cluster) > 20)


@pytest.mark.parametrize("num_tokens", [9, 21])
async def test_migrating_choice(
    model_dir: Path, redis_url: str, expected: AnswerText, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """A migrating choice keeps its blocks while they are read."""
    keep, begin = list[bool](), Moves.begin

    def begin_and_look(self: Moves, sequence: Sequence, *others: Any, **named: Any) -> None:
        begin(self, sequence, *others, **named)
        keep.append(sequence.keeps_blocks)

    monkeypatch.setattr(Moves, "begin", begin_and_look)
    async with local_cluster(model_dir, redis_url, **_tree()) as cluster:
        ceiling = Ceiling(num_tokens)
        ceiling.arm(monkeypatch.setattr)
        answer = await moved(cluster, cluster.generate(_ASKED[0].prompt, _SAMPLED), ceiling)
        assert answer.ids == expected.ids[0]
        await cluster.until(lambda: _num_in_branches(cluster) > 3)
        assert keep == [True]
