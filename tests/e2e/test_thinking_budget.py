"""Thinking budgets: answers equal those of the same model with the end-of-thinking marker in its prompt."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from core.types.constraints import Grammar, GrammarKind
from core.types.failpoint import FailpointStage
from core.types.request import Role, Sampling, choice_seed
from core.types.thinking_budget import ThinkingBudget
from tests.e2e.conftest import Checkpoint, Reference, exact_tree, gib_of_blocks
from tests.engine.steps import prompts
from tests.support.ceiling import Ceiling
from tests.support.character_tokenizer import CHARACTERS, END, save_tokenizer
from tests.support.local_cluster import LocalCluster, local_cluster, moved
from tests.support.rank_in_process import Fault
from tests.support.waiting import WITHIN_S

_SAMPLED = Sampling(max_tokens=40, temperature=1.0, seed=3)
_PROMPTS = prompts(20, 33, 47, 18, 25)
_BUDGETS = (0, 1, 9, 17, 38)  # the last ends within its marker
_CLOSING = tuple(CHARACTERS.index(character) for character in "</think>")
_CHOICES = 2


def _budget(num_tokens: int) -> ThinkingBudget:
    return ThinkingBudget(
        num_tokens=num_tokens, is_open=True, opening="<think>", closing="</think>", closing_ids=_CLOSING
    )


@pytest.fixture(scope="module")
def model_dir(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("letters") / "model"
    shutil.copytree(checkpoint("llama"), directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def expected(model_dir: Path, reference: Reference) -> list[list[int]]:
    """Compute the expected answers without budgets: generate the thinking, then continue after the marker."""
    expected_ids = list[list[int]]()
    for seed, (prompt, budget) in enumerate(zip(_PROMPTS, _BUDGETS, strict=True)):
        for choice in range(_CHOICES):
            sampling = replace(_SAMPLED, seed=choice_seed(seed, choice))
            (thought,) = reference(model_dir, [prompt], sampling) if budget else ([],)
            ids = [*[token.token_id for token in thought[:budget]], *_CLOSING][: _SAMPLED.max_tokens]
            if left := _SAMPLED.max_tokens - len(ids):
                (answer,) = reference(model_dir, [[*prompt, *ids]], replace(sampling, max_tokens=left))
                ids += [token.token_id for token in answer]
            expected_ids.append(ids)
    return expected_ids


async def _ask(cluster: LocalCluster) -> list[list[int]]:
    requests = [
        cluster.generate(prompt, replace(_SAMPLED, seed=seed), id=str(seed), n=_CHOICES, thinking=_budget(budget))
        for seed, (prompt, budget) in enumerate(zip(_PROMPTS, _BUDGETS, strict=True))
    ]
    async with asyncio.timeout(WITHIN_S):
        answers = await asyncio.gather(*requests)
    return [[token.token_id for token in tokens] for answer in answers for tokens in answer.tokens.values()]


async def test_one_pair_including_single_token_answers(
    model_dir: Path, redis_url: str, expected: list[list[int]]
) -> None:
    async with local_cluster(model_dir, redis_url, **exact_tree(1, 1)) as cluster:
        assert await _ask(cluster) == expected
        one = replace(_SAMPLED, max_tokens=1)
        first = await cluster.generate(_PROMPTS[0], one, thinking=_budget(0))  # from the prefill replica alone
        assert first.ids == [_CLOSING[0]] and not first.route.decode_replica
        expected_ids = await cluster.generate(
            _PROMPTS[2], replace(_SAMPLED, seed=2, num_logprobs=1), thinking=_budget(9)
        )
        assert expected_ids.ids == expected[4] and all(token.logprob for token in expected_ids.tokens[0])
        await cluster.idle()
        seen = cluster.seen(cluster.pools[Role.DECODE][0])
        # Per choice, at least the marker's tokens after its first are forced.
        await cluster.until(lambda: seen.status.totals.forced_tokens >= 7 * _CHOICES * 4)


async def test_killed_replica(model_dir: Path, redis_url: str, expected: list[list[int]]) -> None:
    async with local_cluster(model_dir, redis_url, processes=True, **exact_tree(2, 0)) as cluster:
        doomed = await cluster.add(Role.DECODE, Fault(FailpointStage.COMPUTING, nth=9))
        await cluster.add(Role.DECODE)
        assert await _ask(cluster) == expected
        assert doomed.has_been_hit, "the fault never happened"
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


@pytest.mark.parametrize("num_tokens", [5, 12, 20])
async def test_migration_before_within_and_after_the_marker(
    model_dir: Path, redis_url: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    monkeypatch.setattr("engine.scheduler.jump_forward.MAX_KNOWN", 2)
    ceiling = Ceiling(num_tokens)
    ceiling.arm(monkeypatch.setattr)
    async with local_cluster(model_dir, redis_url, **exact_tree(1, 1)) as cluster:
        thinking = cluster.generate(_PROMPTS[2], replace(_SAMPLED, seed=2), thinking=_budget(9))
        answer = await moved(cluster, thinking, ceiling)
        assert answer.ids == expected[4]


async def test_grammar_starts_after_the_marker(model_dir: Path, redis_url: str) -> None:
    text = 'start: thinking answer\nthinking[suffix="</think>"]: /(?s:.*)/\nanswer: "yes, indeed"'
    grammar = Grammar(kind=GrammarKind.LARK, text=text)
    sampling = replace(_SAMPLED, stop_token_ids=(END,))
    async with local_cluster(model_dir, redis_url, **exact_tree(1, 1)) as cluster:
        answer = await cluster.generate(_PROMPTS[0], sampling, n=2, grammar=grammar, thinking=_budget(6))
        for tokens in answer.tokens.values():
            answers_found = "".join(CHARACTERS[token.token_id] for token in tokens[:-1])
            assert answers_found[6:] == "</think>yes, indeed" and tokens[-1].token_id == END
        await cluster.idle()
