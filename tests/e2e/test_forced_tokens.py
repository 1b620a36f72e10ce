"""Jump-forward decoding gives the same answers as masks alone, on one pair of replicas and under faults."""

from __future__ import annotations

import asyncio
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from core.grammar.compiler import GrammarCompiler
from core.types.constraints import Grammar, GrammarKind
from core.types.failpoint import FailpointStage
from core.types.request import FinishReason, Role, Sampling
from engine.config import EngineConfig
from engine.runner.runner import ModelRunner
from engine.sampling.params import SamplingRow
from tests.e2e.conftest import Checkpoint, exact_tree, gib_of_blocks
from tests.engine.asked import Asked, answers
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.support.ceiling import Ceiling
from tests.support.character_tokenizer import CHARACTERS, END, save_tokenizer
from tests.support.grids import quick
from tests.support.local_cluster import LocalCluster, local_cluster, moved
from tests.support.rank_in_process import Fault
from tests.support.waiting import WITHIN_S

_GRAMMAR = Grammar(kind=GrammarKind.REGEX, text="(a|b)-is-forced-[1-9]{2}-and-so-is-this(x|y|z)-to-its-very-end[1-9]")
_SAMPLED = Sampling(max_tokens=70, temperature=1.0, seed=3, stop_token_ids=(END,))
_PROMPTS = prompts(20, 33, 47, 18)
_SAMPLINGS = (
    _SAMPLED,
    replace(_SAMPLED, temperature=0.0),
    replace(_SAMPLED, max_tokens=20, seed=9),  # ends within forced tokens
    replace(_SAMPLED, num_logprobs=1, presence_penalty=1.0),
)
_PRIVATE = prompts(24, 31)


@pytest.fixture(scope="module")
def model_dir(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("letters") / "model"
    shutil.copytree(checkpoint("llama"), directory)
    save_tokenizer(directory)
    return directory


async def _ask(cluster: LocalCluster) -> list[list[int]]:
    """Run four requests with a grammar, of two choices each, beside two without one."""
    requests = [
        cluster.generate(prompt, sampling, id=str(i), n=2, grammar=_GRAMMAR)
        for i, (prompt, sampling) in enumerate(zip(_PROMPTS, _SAMPLINGS, strict=True))
    ]
    requests += [cluster.generate(prompt, replace(_SAMPLED, seed=i), id=f"f{i}") for i, prompt in enumerate(_PRIVATE)]
    async with asyncio.timeout(WITHIN_S):
        answers = await asyncio.gather(*requests)
    return [[token.token_id for token in tokens] for answer in answers for tokens in answer.tokens.values()]


def _num_forced(cluster: LocalCluster) -> int:
    seen = [cluster.seen(replica) for replica in cluster.pools[Role.DECODE] if replica.is_alive]
    return sum(replica.status.totals.forced_tokens for replica in seen)


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[int]]:
    """Compute the expected answers in one process, one token per step."""
    runner = ModelRunner(EngineConfig(model_dir=model_dir, dtype="float32", kv_memory_gib=0.1))
    grammar = GrammarCompiler(model_dir, vocab_size=VOCAB_SIZE).compile(_GRAMMAR)
    requests = [
        Asked(prompt, sampling, grammar, num_choices=2) for prompt, sampling in zip(_PROMPTS, _SAMPLINGS, strict=True)
    ]
    requests += [Asked(prompt, replace(_SAMPLED, seed=i)) for i, prompt in enumerate(_PRIVATE)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SamplingRow, "known_token", lambda row: None)
        expected_answers = answers(runner, requests)
    text = "".join(CHARACTERS[token] for token in expected_answers.ids[0][:-1])
    assert re.fullmatch(_GRAMMAR.text, text) and expected_answers.ids[0][-1] == END and not expected_answers.num_known
    return expected_answers.ids


@pytest.mark.parametrize("tp", quick([1, 2], [1]))
async def test_one_pair_of_any_tensor_parallel_size(
    model_dir: Path, redis_url: str, expected: list[list[int]], tp: int
) -> None:
    tree = exact_tree(1, 1)
    tree["decode"] |= {"tensor_parallel": tp, "max_running": 12, "max_batch_tokens": 20}
    async with local_cluster(model_dir, redis_url, processes=tp > 1, **tree) as cluster:
        assert await _ask(cluster) == expected
        await cluster.idle()
        await cluster.until(lambda: _num_forced(cluster) >= 150)
        cut = await cluster.generate(_PROMPTS[0], replace(_SAMPLED, max_tokens=6), grammar=_GRAMMAR)
        assert cut.ids == expected[0][:6] and cut.tokens[0][-1].finish_reason is FinishReason.LENGTH
        await cluster.idle()


async def test_killed_replica(model_dir: Path, redis_url: str, expected: list[list[int]]) -> None:
    async with local_cluster(model_dir, redis_url, processes=True, **exact_tree(2, 0)) as cluster:
        doomed = await cluster.add(Role.DECODE, Fault(FailpointStage.COMPUTING, nth=4))
        await cluster.add(Role.DECODE)
        assert await _ask(cluster) == expected
        assert doomed.has_been_hit, "the fault never happened"
        assert await _ask(cluster) == expected
        await cluster.idle()


async def test_preemption(model_dir: Path, redis_url: str, expected: list[list[int]]) -> None:
    """The pool has 20 blocks, and the router expects answers of one token."""
    tree = exact_tree(1, 1)
    tree["decode"] |= {"kv_memory_gib": gib_of_blocks(20)}
    async with local_cluster(model_dir, redis_url, **tree) as cluster:
        cluster.core.reservations.finished([1] * 200)
        assert await _ask(cluster) == expected
        await cluster.idle()
        await cluster.until(lambda: cluster.seen(cluster.pools[Role.DECODE][0]).status.totals.preemptions)


@pytest.mark.parametrize("num_tokens", quick([3, 9, 21], [9]))
async def test_migration_within_forced_tokens(
    model_dir: Path, redis_url: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    monkeypatch.setattr("engine.scheduler.jump_forward.MAX_KNOWN", 4)
    ceiling = Ceiling(num_tokens)
    ceiling.arm(monkeypatch.setattr)
    async with local_cluster(model_dir, redis_url, **exact_tree(1, 1)) as cluster:
        answer = await moved(cluster, cluster.generate(_PROMPTS[0], _SAMPLED, grammar=_GRAMMAR), ceiling)
        assert answer.ids == expected[0]
