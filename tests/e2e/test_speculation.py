"""Speculative decoding: answers of a deployment with drafts equal those of one process without."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.types.failpoint import FailpointStage
from core.types.request import DraftTally, Role, Sampling
from core.types.token_rules import TokenRules
from engine.config import EngineConfig
from engine.runner.runner import ModelRunner
from engine.timing.pace import Pace
from tests.e2e.conftest import Checkpoint, exact_tree, gib_of_blocks
from tests.engine.asked import Asked, answers
from tests.engine.spec_decode.draft_models.smaller_model import first_layers
from tests.engine.steps import prompts
from tests.support.ceiling import Ceiling
from tests.support.grids import quick
from tests.support.local_cluster import Answer, LocalCluster, LocalReplica, local_cluster, moved
from tests.support.rank_in_process import Fault
from tests.support.waiting import WITHIN_S

_SAMPLED = Sampling(max_tokens=40, temperature=1.0, seed=3)
_PROMPTS = prompts(20, 33, 47, 18, 25)
_FEW = TokenRules(allowed_token_ids=(5, 6, 7))  # so few tokens that drafts from the sequence itself match
_SAMPLINGS = (
    _SAMPLED,
    replace(_SAMPLED, temperature=0.0),
    replace(_SAMPLED, temperature=0.7, presence_penalty=1.0, num_logprobs=1),
    replace(_SAMPLED, max_tokens=13, seed=9),
    replace(_SAMPLED, token_rules=_FEW),
)


@pytest.fixture(scope="module")
def model_dir(checkpoint: Checkpoint) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[int]]:
    runner = ModelRunner(EngineConfig(model_dir=model_dir, dtype="float32", kv_memory_gib=0.1))
    requests = [Asked(prompt, sampling, num_choices=2) for prompt, sampling in zip(_PROMPTS, _SAMPLINGS, strict=True)]
    return answers(runner, requests).ids


@pytest.fixture
def drafts_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable measured step times, so that drafting does not depend on the machine's speed."""
    monkeypatch.setattr(Pace, "timing", None)


@pytest.fixture(scope="module")
def smaller_dir(model_dir: Path) -> str:
    return str(first_layers(model_dir, 2))


def _tree(method: str, prefill: int = 1, decode: int = 1, model: str | None = None) -> dict[str, Any]:
    return exact_tree(prefill, decode) | {"speculation": {"method": method, "max_tokens": 5, "model": model}}


async def _answers(cluster: LocalCluster) -> list[Answer]:
    requests = [
        cluster.generate(prompt, sampling, id=str(i), n=2)
        for i, (prompt, sampling) in enumerate(zip(_PROMPTS, _SAMPLINGS, strict=True))
    ]
    async with asyncio.timeout(WITHIN_S):
        return await asyncio.gather(*requests)


async def _ask(cluster: LocalCluster) -> list[list[int]]:
    return _ids(await _answers(cluster))


def _ids(found: list[Answer]) -> list[list[int]]:
    return [[token.token_id for token in tokens] for answer in found for tokens in answer.tokens.values()]


def _num_accepted(cluster: LocalCluster, *replicas: LocalReplica) -> int:
    seen = [cluster.seen(replica) for replica in replicas or cluster.pools[Role.DECODE] if replica.is_alive]
    return sum(sum(one.accepted) for replica in seen for one in replica.status.totals.drafted)


@pytest.mark.usefixtures("drafts_always")
@pytest.mark.parametrize("method", quick(["ngram", "suffix", "draft", "self", "auto"], ["suffix", "auto"]))
async def test_on_one_pair(
    model_dir: Path, smaller_dir: str, redis_url: str, expected: list[list[int]], method: str
) -> None:
    tree = _tree(method, model=smaller_dir if method in ("draft", "auto") else None)
    async with local_cluster(model_dir, redis_url, **tree) as cluster:
        drafts = DraftTally()
        for _ in range(2):  # the second time, drafts use the first answers
            found = await _answers(cluster)
            assert _ids(found) == expected
            for answer in found:
                drafts.add(answer.route.drafts)
        await cluster.idle()
        replica = cluster.pools[Role.DECODE][0]
        await cluster.until(lambda: _num_accepted(cluster) == drafts.accepted)
        assert sum(sum(one.tokens) for one in cluster.seen(replica).status.totals.drafted) == drafts.drafted
        assert drafts.steps >= drafts.drafts + drafts.unguessed > 0
        status = cluster.seen(replica).status
        assert 1 < status.tokens_per_row < 1 + status.drafted_per_row
        await cluster.until(lambda: _num_accepted(cluster) > (100 if method in ("suffix", "auto") else 10))


async def test_two_ranks_of_which_one_follows(
    model_dir: Path, smaller_dir: str, redis_url: str, expected: list[list[int]]
) -> None:
    """The follower does not load the draft model of rank 0."""
    tree = _tree("draft", model=smaller_dir)
    tree["decode"] |= {"tensor_parallel": 2}
    async with local_cluster(model_dir, redis_url, processes=True, **tree) as cluster:
        for _ in range(3):
            assert await _ask(cluster) == expected
        await cluster.idle()


@pytest.mark.parametrize("method", quick(["suffix", "draft"], ["draft"]))
async def test_killed_replica(
    model_dir: Path, smaller_dir: str, redis_url: str, expected: list[list[int]], method: str
) -> None:
    tree = _tree(method, 2, 0, model=smaller_dir if method == "draft" else None)
    async with local_cluster(model_dir, redis_url, processes=True, **tree) as cluster:
        doomed = await cluster.add(Role.DECODE, Fault(FailpointStage.COMPUTING, nth=30))
        await cluster.add(Role.DECODE)
        for _ in range(3):
            assert await _ask(cluster) == expected
        assert doomed.has_been_hit, "the fault never happened"
        await cluster.idle()


@pytest.mark.usefixtures("drafts_always")
async def test_a_replica_drafts_from_answers_that_it_has_finished(
    model_dir: Path, redis_url: str, expected: list[list[int]]
) -> None:
    async with local_cluster(model_dir, redis_url, **_tree("suffix")) as cluster:
        replica, num_tokens = cluster.pools[Role.DECODE][0], sum(map(len, expected))
        assert await _ask(cluster) == expected
        await cluster.until(lambda: cluster.seen(replica).status.corpus_tokens >= num_tokens)
        num_before = _num_accepted(cluster, replica)
        assert await _ask(cluster) == expected
        await cluster.idle()
        await cluster.until(lambda: _num_accepted(cluster, replica) > 2 * num_before + 100)


@pytest.mark.usefixtures("drafts_always")
async def test_preemption(model_dir: Path, redis_url: str, expected: list[list[int]]) -> None:
    """The pool has 20 blocks, and the router expects answers of one token."""
    tree = _tree("suffix")
    tree["decode"] |= {"kv_memory_gib": gib_of_blocks(20)}
    async with local_cluster(model_dir, redis_url, **tree) as cluster:
        for _ in range(2):
            cluster.core.reservations.finished([1] * 200)
            assert await _ask(cluster) == expected
        await cluster.idle()
        await cluster.until(lambda: cluster.seen(cluster.pools[Role.DECODE][0]).status.totals.preemptions)


@pytest.mark.usefixtures("drafts_always")
@pytest.mark.parametrize(
    ("method", "num_tokens"), quick([("suffix", 9), ("draft", 9), ("suffix", 3), ("suffix", 21)], [("suffix", 9)])
)
async def test_migrating_choice(
    model_dir: Path,
    smaller_dir: str,
    redis_url: str,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    num_tokens: int,
) -> None:
    tree = _tree(method, model=smaller_dir if method == "draft" else None)
    async with local_cluster(model_dir, redis_url, **tree) as cluster:
        assert await _ask(cluster) == expected
        ceiling = Ceiling(num_tokens)
        ceiling.arm(monkeypatch.setattr)
        answer = await moved(cluster, cluster.generate(_PROMPTS[0], _SAMPLED), ceiling)
        assert answer.ids == expected[0]
