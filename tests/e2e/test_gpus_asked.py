"""All request options on a GPU deployment: answers equal those of one process, also with drafts and preemption.

The same on a CPU, where it is slow and says that the test is right.
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from numpy.testing import assert_allclose, assert_array_equal

from core.grammar.compiler import GrammarCompiler
from core.types.prompt_logprobs import PromptLogprobs
from core.types.request import Role, Sampling
from core.types.thinking_budget import ThinkingBudget
from engine.config import EngineConfig
from engine.runner.runner import ModelRunner
from router.routing.plain_policies import RoundRobin
from tests.e2e.conftest import Checkpoint, Lab, exact_tree, gib_of_blocks, on_device
from tests.engine.asked import LETTERS, AnswerText, Asked, answers, compare, letters_grammar, one_of_each_kind
from tests.engine.scored_prompts import ScoredPrompts
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.support.character_tokenizer import CHARACTERS
from tests.support.draft_always import draft_always
from tests.support.local_cluster import LocalCluster, LocalReplica
from tests.support.waiting import WITHIN_S

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.parametrize(
        "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
    ),
]

_BUDGET = ThinkingBudget(
    num_tokens=10,
    is_open=True,
    opening="<think>",
    closing="</think>",
    closing_ids=tuple(CHARACTERS.index(character) for character in "</think>"),
)
_ATOL = 1e-3  # of log-probabilities, because batch shapes differ
_NUM_TOP = 3


@dataclass(frozen=True)
class Question:
    """Requests and their reference answers of one process; every third prompt is scored, too."""

    model_dir: Path
    asked: list[Asked]
    said: AnswerText
    scored: dict[int, PromptLogprobs]

    @classmethod
    def of(cls, model_dir: Path, device: str) -> Question:
        """Create the requests. Replaces the model's tokenizer, for the grammar."""
        grammar = letters_grammar(model_dir)
        thinking = GrammarCompiler(model_dir, vocab_size=VOCAB_SIZE).bounded(_BUDGET, None)
        asked = [one for one in one_of_each_kind(grammar) if one.thinking is None]
        asked.append(Asked(prompts(40)[0], Sampling(max_tokens=30, temperature=1.0, seed=9), thinking=thinking))
        runner = ModelRunner(EngineConfig(model_dir=model_dir, dtype="float32", kv_memory_gib=0.1, device=device))
        scored = range(0, len(asked), 3)
        scores = ScoredPrompts(runner, max_batch_tokens=512).tell([(asked[i].prompt, _NUM_TOP) for i in scored])
        return cls(model_dir, asked, answers(runner, asked), dict(zip(scored, scores, strict=True)))

    async def check(self, cluster: LocalCluster) -> None:
        """Send all requests concurrently and check the answers."""
        running = [
            cluster.generate(
                one.prompt,
                one.sampling,
                id=str(i),
                n=one.num_choices,
                grammar=LETTERS if one.grammar else None,
                thinking=_BUDGET if one.thinking else None,
                num_prompt_logprobs=_NUM_TOP if i in self.scored else None,
            )
            for i, one in enumerate(self.asked)
        ]
        async with asyncio.timeout(WITHIN_S):
            found = await asyncio.gather(*running)
        tokens = {(str(i), choice): some for i, one in enumerate(found) for choice, some in one.tokens.items()}
        compare(AnswerText(tokens), self.said, atol=_ATOL)
        for i, answer in enumerate(found):
            _compare_prompts(answer.prompt_logprobs, self.scored.get(i))


def _compare_prompts(found: PromptLogprobs | None, expected: PromptLogprobs | None) -> None:
    assert (found is None) == (expected is None)
    if found and expected:
        assert_array_equal(found.ranks_P, expected.ranks_P)
        assert_array_equal(found.top_ids_PK, expected.top_ids_PK)
        assert_allclose(found.logprobs_P, expected.logprobs_P, atol=_ATOL)
        assert_allclose(found.top_logprobs_PK, expected.top_logprobs_PK, atol=_ATOL)


@pytest.fixture
def model_dir(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint("llama"), tmp_path / "model")


def _tree(device: str, **decode: Any) -> dict[str, Any]:
    tree = on_device(device, exact_tree(1, 1))
    tree["decode"] |= {"max_running": 32} | decode
    return tree


@pytest.mark.parametrize("tp", [1, 2])
async def test_all_request_options(model_dir: Path, lab: Lab, tp: int, device: str) -> None:
    question, tree = Question.of(model_dir, device), _tree(device, tensor_parallel=tp)
    tree["prefill"] |= {"tensor_parallel": tp}
    async with lab.own(model_dir, processes=True, **tree) as cluster:
        await question.check(cluster)
        await cluster.idle()
        (decode,) = cluster.pools[Role.DECODE]
        await cluster.until(lambda: cluster.seen(decode).status.totals.forced_tokens)


async def test_answers_with_drafts(model_dir: Path, lab: Lab, device: str) -> None:
    question, tree = Question.of(model_dir, device), _tree(device, replicas=0)
    tree["speculation"] = {"method": "suffix", "max_tokens": 3}
    async with lab.own(model_dir, processes=True, policy=RoundRobin(), **tree) as cluster:
        decode = await cluster.add(Role.DECODE, prepare=draft_always)
        for _ in range(2):  # the second time, drafts use the first answers
            await question.check(cluster)
        await cluster.idle()
        await cluster.until(lambda: _num_accepted(cluster, decode) > 100)


def _num_accepted(cluster: LocalCluster, replica: LocalReplica) -> int:
    return sum(sum(one.accepted) for one in cluster.seen(replica).status.totals.drafted)


async def test_answers_with_preemption(model_dir: Path, lab: Lab, device: str) -> None:
    """The pool has 20 blocks, and the router expects answers of one token."""
    question, tree = Question.of(model_dir, device), _tree(device, kv_memory_gib=gib_of_blocks(20))
    async with lab.own(model_dir, processes=True, **tree) as cluster:
        cluster.core.reservations.finished([1] * 200)
        await question.check(cluster)
        await cluster.idle()
        (decode,) = cluster.pools[Role.DECODE]
        await cluster.until(lambda: cluster.seen(decode).status.totals.preemptions)
