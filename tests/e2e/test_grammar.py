"""Grammar-constrained answers on one or two pairs of replicas, with kills, migrations and forks."""

from __future__ import annotations

import asyncio
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from core.types.constraints import Grammar, GrammarKind
from core.types.errors import GrammarNotFollowed, NoTokenAllowed, RequestError
from core.types.failpoint import FailpointStage
from core.types.request import FinishReason, Role, Sampling
from core.types.token_rules import TokenRules
from tests.e2e.conftest import Checkpoint, exact_tree
from tests.engine.steps import prompts
from tests.support.ceiling import Ceiling
from tests.support.character_tokenizer import CHARACTERS, END, save_tokenizer
from tests.support.local_cluster import Answer, LocalCluster, local_cluster, moved
from tests.support.rank_in_process import Fault
from tests.support.waiting import WITHIN_S

_SAMPLED = Sampling(max_tokens=40, temperature=1.0, seed=3, stop_token_ids=(END,))
_PROMPTS = prompts(20, 33, 47, 18)
_LETTERS = "[a-c][1-9]{12,20}(xy|z){6,8}"
_GRAMMAR = Grammar(kind=GrammarKind.REGEX, text=_LETTERS)
_SHORT = Grammar(kind=GrammarKind.REGEX, text="a[bc]")
_A, _B, _C, _Z, _FIVE = map(CHARACTERS.index, "abcz5")


@pytest.fixture(scope="module")
def model_dir(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("letters") / "model"
    shutil.copytree(checkpoint("llama"), directory)
    save_tokenizer(directory)
    return directory


async def _ask(cluster: LocalCluster, sampling: Sampling = _SAMPLED) -> list[list[int]]:
    requests = [
        cluster.generate(prompt, replace(sampling, seed=seed), id=str(seed), n=2, grammar=_GRAMMAR)
        for seed, prompt in enumerate(_PROMPTS)
    ]
    async with asyncio.timeout(WITHIN_S):
        answers = await asyncio.gather(*requests)
    for answer in answers:
        _check(answer)
    return [[token.token_id for token in tokens] for answer in answers for tokens in answer.tokens.values()]


def _check(answer: Answer, pattern: str = _LETTERS) -> None:
    for tokens in answer.tokens.values():
        assert tokens[-1].finish_reason is FinishReason.STOP
        assert re.fullmatch(pattern, "".join(CHARACTERS[token.token_id] for token in tokens[:-1]))


async def test_choices_follow_the_grammar_on_one_and_two_pairs_and_under_a_kill(
    model_dir: Path, redis_url: str
) -> None:
    async with local_cluster(model_dir, redis_url, **exact_tree(1, 1)) as cluster:
        expected = await _ask(cluster)
        assert len({tuple(tokens) for tokens in expected}) > len(_PROMPTS), "the choices of a request are the same"
        one = replace(_SAMPLED, max_tokens=1)
        first = await cluster.generate(_PROMPTS[0], one, grammar=_GRAMMAR)  # from the prefill replica alone
        assert CHARACTERS[first.ids[0]] in "abc" and first.tokens[0][0].finish_reason is FinishReason.LENGTH
        await cluster.idle()
    async with local_cluster(model_dir, redis_url, processes=True, **exact_tree(2, 0)) as cluster:
        doomed = await cluster.add(Role.DECODE, Fault(FailpointStage.COMPUTING, nth=9))
        await cluster.add(Role.DECODE)
        assert await _ask(cluster) == expected
        assert doomed.has_been_hit, "the fault never happened"
        assert await _ask(cluster) == expected
        await cluster.idle()


async def test_migrated_choice_continues_its_grammar(
    model_dir: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ceiling = Ceiling(12)
    ceiling.arm(monkeypatch.setattr)
    async with local_cluster(model_dir, redis_url, **exact_tree(1, 1)) as cluster:
        ruled = replace(_SAMPLED, token_rules=TokenRules(logit_bias=((_FIVE, 2.0),), bad_words=((_FIVE, _FIVE), (_Z,))))
        answer = await moved(cluster, cluster.generate(_PROMPTS[0], ruled, grammar=_GRAMMAR), ceiling)
        _check(answer, "[a-c](?!.*55)[1-9]{12,20}(xy){6,8}")
        stayed = await cluster.generate(_PROMPTS[0], ruled, grammar=_GRAMMAR)
        assert stayed.ids == answer.ids


async def test_failing_grammar_fails_its_own_request_only(model_dir: Path, redis_url: str) -> None:
    """Invalid and contradictory grammars fail their own request only.

    The first has no terminating token, the second is malformed. Two leave no allowed token together with the other
    options, one on the prefill replica and one on the decode replica.
    """
    async with local_cluster(model_dir, redis_url, **exact_tree(1, 1)) as cluster:
        endless = cluster.generate(_PROMPTS[0], replace(_SAMPLED, stop_token_ids=()), id="a", grammar=_SHORT)
        no_grammar = Grammar(kind=GrammarKind.REGEX, text="(")
        wrong = cluster.generate(_PROMPTS[1], _SAMPLED, id="b", grammar=no_grammar)
        good = cluster.generate(_PROMPTS[2], _SAMPLED, id="c", grammar=_GRAMMAR)
        plain = cluster.generate(_PROMPTS[3], _SAMPLED, id="d")
        torn = [
            cluster.generate(_PROMPTS[0], replace(_SAMPLED, token_rules=rules), id=str(i), grammar=_SHORT)
            for i, rules in enumerate((TokenRules(allowed_token_ids=(_Z,)), TokenRules(bad_words=((_A, _B), (_A, _C)))))
        ]
        requests = (endless, wrong, good, plain, *torn)
        failed, rejected, kept, free, *lost = await asyncio.gather(*requests, return_exceptions=True)
        assert [type(one) for one in lost] == [NoTokenAllowed] * 2
        assert isinstance(failed, GrammarNotFollowed)
        assert isinstance(rejected, RequestError) and rejected.param == "grammar"
        assert isinstance(kept, Answer) and isinstance(free, Answer)
        _check(kept)
        await cluster.idle()
