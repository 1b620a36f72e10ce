"""Grammars, forced tokens, thinking budgets and drafts give the tokens of one process on each path of a request."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from core.grammar.compiler import GrammarCompiler
from core.types.errors import GrammarNotFollowed, NoTokenAllowed, RequestError
from core.types.failpoint import FailpointStage
from core.types.request import (
    DraftTally,
    FinishReason,
    Grammar,
    GrammarKind,
    Role,
    Sampling,
    ThinkingBudget,
    TokenRules,
    choice_seed,
)
from engine.config import EngineConfig
from engine.runner.runner import ModelRunner
from engine.sampling.params import SamplingRow
from engine.timing.pace import Pace
from tests.e2e.conftest import Checkpoint, Lab, Reference, exact_tree, gib_of_blocks
from tests.engine.engine_requests import Asked, answers
from tests.engine.spec_decode.draft_models.smaller_model import first_layers
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.support.character_tokenizer import CHARACTERS, END
from tests.support.grids import quick
from tests.support.local_cluster import Answer, LocalCluster, moved
from tests.support.long_answers import Ceiling
from tests.support.rank_in_process import Fault
from tests.support.waiting import WITHIN_S

_SAMPLED = Sampling(max_tokens=40, temperature=1.0, seed=3)
_PROMPTS = prompts(20, 33, 47, 18, 25)
_A, _B, _C, _Z, _FIVE = map(CHARACTERS.index, "abcz5")
_CLOSING = tuple(CHARACTERS.index(character) for character in "</think>")
_FORCED = Grammar(kind=GrammarKind.REGEX, text="(a|b)-is-forced-[1-9]{2}-and-so-is-this(x|y|z)-to-its-very-end[1-9]")
_BUDGETS = (0, 1, 9, 17, 38)  # the last ends within its marker


@dataclass(frozen=True)
class Feature:
    """Requests for two choices each, and their tokens as one process generates them without shortcuts."""

    model_dir: Path
    requests: list[dict[str, Any]]  # arguments of LocalCluster.generate
    expected: list[list[int]]  # of each choice
    sections: dict[str, Any] = field(default_factory=dict)  # of the spec

    def tree(self, prefill: int, decode: int, *, tp: tuple[int, int] = (1, 1)) -> dict[str, Any]:
        return exact_tree(prefill, decode, tp=tp) | self.sections

    async def check(self, cluster: LocalCluster) -> list[Answer]:
        """Send all requests at once and compare the answers."""
        requests = [cluster.generate(id=str(number), n=2, **one) for number, one in enumerate(self.requests)]
        async with asyncio.timeout(WITHIN_S):
            found = await asyncio.gather(*requests)
        tokens = [[token.token_id for token in tokens] for answer in found for tokens in answer.tokens.values()]
        assert tokens == self.expected
        return found


def _budget(num_tokens: int) -> ThinkingBudget:
    return ThinkingBudget(
        num_tokens=num_tokens, is_open=True, opening="<think>", closing="</think>", closing_ids=_CLOSING
    )


def _of_forced_tokens(model_dir: Path) -> Feature:
    """Return requests with a grammar beside some without one; the reference masks each token, one per step."""
    sampled = replace(_SAMPLED, max_tokens=70, stop_token_ids=(END,))
    rules = TokenRules(logit_bias=((_FIVE, 2.0),), bad_words=((_FIVE, _FIVE), (_Z,)))
    samplings = (
        sampled,
        replace(sampled, temperature=0.0),
        replace(sampled, max_tokens=20, seed=9),  # ends within forced tokens
        replace(sampled, num_logprobs=1, presence_penalty=1.0),
        replace(sampled, token_rules=rules),
    )
    requests: list[dict[str, Any]] = [
        {"prompt": prompt, "sampling": sampling, "grammar": _FORCED}
        for prompt, sampling in zip(_PROMPTS, samplings, strict=True)
    ]
    requests += [{"prompt": prompt, "sampling": replace(sampled, seed=i)} for i, prompt in enumerate(prompts(24, 31))]
    compiled = GrammarCompiler(model_dir, vocab_size=VOCAB_SIZE).compile(_FORCED)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SamplingRow, "known_token", lambda row: None)
        found = answers(
            ModelRunner(EngineConfig(model_dir=model_dir, dtype="float32", kv_memory_gib=0.1)),
            [Asked(one["prompt"], one["sampling"], compiled if "grammar" in one else None, 2) for one in requests],
        )
    for ids, pattern in ((found.ids[0], _FORCED.text), (found.ids[8], f"(?!.*(55|z)){_FORCED.text}")):
        assert re.fullmatch(pattern, "".join(CHARACTERS[token] for token in ids[:-1])) and ids[-1] == END
    assert not found.num_known
    return Feature(model_dir, requests, found.ids)


def _of_thinking(model_dir: Path, reference: Reference) -> Feature:
    """Return requests with budgets; the reference thinks without one, and then continues after the marker."""
    requests, expected = list[dict[str, Any]](), list[list[int]]()
    for seed, (prompt, budget) in enumerate(zip(_PROMPTS, _BUDGETS, strict=True)):
        requests.append({"prompt": prompt, "sampling": replace(_SAMPLED, seed=seed), "thinking": _budget(budget)})
        for choice in range(2):
            sampling = replace(_SAMPLED, seed=choice_seed(seed, choice))
            [thought] = reference.ids(model_dir, [prompt], sampling) if budget else ([],)
            ids = [*thought[:budget], *_CLOSING][: _SAMPLED.max_tokens]
            if left := _SAMPLED.max_tokens - len(ids):
                ids += reference.ids(model_dir, [[*prompt, *ids]], replace(sampling, max_tokens=left))[0]
            expected.append(ids)
    return Feature(model_dir, requests, expected)


def _of_drafts(model_dir: Path, method: str) -> Feature:
    samplings = (
        _SAMPLED,
        replace(_SAMPLED, temperature=0.0),
        replace(_SAMPLED, temperature=0.7, presence_penalty=1.0, num_logprobs=1),
        replace(_SAMPLED, max_tokens=13, seed=9),
        # So few tokens that drafts from the sequence itself match.
        replace(_SAMPLED, token_rules=TokenRules(allowed_token_ids=(5, 6, 7))),
    )
    runner = ModelRunner(EngineConfig(model_dir=model_dir, dtype="float32", kv_memory_gib=0.1))
    pairs = list(zip(_PROMPTS, samplings, strict=True))
    expected = answers(runner, [Asked(prompt, sampling, num_choices=2) for prompt, sampling in pairs]).ids
    requests = [{"prompt": prompt, "sampling": sampling} for prompt, sampling in pairs]
    model = str(first_layers(model_dir, 2)) if method in ("draft", "auto") else None
    speculation = {"method": method, "max_tokens": 5, "model": model}
    return Feature(model_dir, requests, expected, {"speculation": speculation})


@pytest.fixture(scope="module")
def features(checkpoint: Checkpoint, letters_dir: Path, reference: Reference) -> Callable[[str], Feature]:
    """features("forced"), features("thinking"), features(METHOD) of drafts."""

    @cache
    def make(name: str) -> Feature:
        match name:
            case "forced":
                return _of_forced_tokens(letters_dir)
            case "thinking":
                return _of_thinking(letters_dir, reference)
            case _:
                return _of_drafts(checkpoint("llama"), name)

    return make


@pytest.fixture
def drafts_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable measured step times, so that drafting does not depend on the machine's speed."""
    monkeypatch.setattr(Pace, "timing", None)


@pytest.mark.parametrize("tp", quick([1, 2], [1]))
async def test_forced_tokens_on_one_pair(features: Callable[[str], Feature], lab: Lab, tp: int) -> None:
    feature = features("forced")
    tree = feature.tree(1, 1, tp=(1, tp))
    tree["decode"] |= {"max_running": 16, "max_batch_tokens": 20}
    async with lab.shared(feature.model_dir, processes=tp > 1, **tree) as cluster:
        await feature.check(cluster)
        await cluster.until(lambda: cluster.totals(Role.DECODE).forced_tokens >= 150)
        first = feature.requests[0]
        cut = await cluster.generate(**first | {"sampling": replace(first["sampling"], max_tokens=6)})
        assert cut.ids == feature.expected[0][:6] and cut.tokens[0][-1].finish_reason is FinishReason.LENGTH
        one = await cluster.generate(**first | {"sampling": replace(first["sampling"], max_tokens=1)})
        assert one.ids == feature.expected[0][:1] and not one.route.decode_replica


async def test_thinking_on_one_pair(features: Callable[[str], Feature], lab: Lab) -> None:
    feature = features("thinking")
    async with lab.shared(feature.model_dir, **feature.tree(1, 1)) as cluster:
        await feature.check(cluster)
        # Per choice, at least the marker's tokens after its first are forced.
        await cluster.until(lambda: cluster.totals(Role.DECODE).forced_tokens >= 7 * 2 * 4)
        first = await cluster.generate(_PROMPTS[0], replace(_SAMPLED, max_tokens=1), thinking=_budget(0))
        assert first.ids == [_CLOSING[0]] and not first.route.decode_replica
        scored = await cluster.generate(_PROMPTS[2], replace(_SAMPLED, seed=2, num_logprobs=1), thinking=_budget(9))
        assert scored.ids == feature.expected[4] and all(token.logprob for token in scored.tokens[0])


@pytest.mark.usefixtures("drafts_always")
@pytest.mark.parametrize("method", quick(["ngram", "suffix", "draft", "self", "auto"], ["suffix", "auto"]))
async def test_drafts_on_one_pair(features: Callable[[str], Feature], lab: Lab, method: str) -> None:
    """The second time, drafts also use the answers that the replica has finished."""
    feature, drafts = features(method), DraftTally()
    async with lab.own(feature.model_dir, **feature.tree(1, 1)) as cluster:
        seen = cluster.seen(cluster.pools[Role.DECODE][0])

        def num_accepted() -> int:
            return sum(sum(one.accepted) for one in seen.status.totals.drafted)

        accepted = []
        for _ in range(2):
            for answer in await feature.check(cluster):
                drafts.add(answer.route.drafts)
            await cluster.until(lambda: num_accepted() == drafts.accepted)
            accepted.append(drafts.accepted)
            if method == "suffix":
                await cluster.until(lambda: seen.status.corpus_tokens >= sum(map(len, feature.expected)))
        assert sum(sum(one.tokens) for one in seen.status.totals.drafted) == drafts.drafted
        assert drafts.steps >= drafts.drafts + drafts.unguessed > 0
        assert 1 < seen.status.tokens_per_row < 1 + seen.status.drafted_per_row
        assert accepted[1] > (2 * accepted[0] + 100 if method == "suffix" else 100 if method == "auto" else 10)


async def test_two_ranks_of_which_one_follows(features: Callable[[str], Feature], lab: Lab) -> None:
    """The follower does not load the draft model of rank 0."""
    feature = features("draft")
    async with lab.own(feature.model_dir, processes=True, **feature.tree(1, 1, tp=(1, 2))) as cluster:
        for _ in range(3):
            await feature.check(cluster)


@pytest.mark.parametrize(
    ("name", "nth"),
    quick(
        [("forced", 4), ("thinking", 9), ("draft", 30), ("suffix", 30)], [("forced", 4), ("thinking", 9), ("draft", 30)]
    ),
)
async def test_killed_replica(features: Callable[[str], Feature], lab: Lab, name: str, nth: int) -> None:
    feature = features(name)
    async with lab.own(feature.model_dir, processes=True, **feature.tree(2, 0)) as cluster:
        doomed = await cluster.add(Role.DECODE, Fault(FailpointStage.COMPUTING, nth=nth))
        await cluster.add(Role.DECODE)
        for _ in range(3):
            await feature.check(cluster)
        assert doomed.has_been_hit, "the fault never happened"


@pytest.mark.usefixtures("drafts_always")
@pytest.mark.parametrize("name", ["forced", "thinking", "suffix"])
async def test_preemption(features: Callable[[str], Feature], lab: Lab, name: str) -> None:
    """The pool has 20 blocks, and the router expects answers of one token."""
    feature = features(name)
    tree = feature.tree(1, 1)
    tree["decode"] |= {"kv_memory_gib": gib_of_blocks(20)}
    async with lab.shared(feature.model_dir, **tree) as cluster:
        for _ in range(2):
            cluster.core.reservations.finished([1] * 200)
            await feature.check(cluster)
        await cluster.until(lambda: cluster.totals(Role.DECODE).preemptions)


_MOVES = [
    *(("forced", 0, num_tokens) for num_tokens in (9, 3, 21)),
    ("forced", 4, 12),  # with token rules
    *(("thinking", 2, num_tokens) for num_tokens in (5, 12, 20)),  # before, within and after the marker
    *(("suffix", 0, num_tokens) for num_tokens in (9, 3, 21)),
    ("draft", 0, 9),
]
_SLOW_MOVES = [("forced", 0, 3), ("forced", 0, 21), ("suffix", 0, 3), ("suffix", 0, 21), ("draft", 0, 9)]


@pytest.mark.usefixtures("drafts_always")
@pytest.mark.parametrize(
    ("name", "number", "num_tokens"), quick(_MOVES, [one for one in _MOVES if one not in _SLOW_MOVES])
)
async def test_migrating_choice(
    features: Callable[[str], Feature],
    lab: Lab,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    number: int,
    num_tokens: int,
) -> None:
    feature = features(name)
    monkeypatch.setattr("engine.scheduler.jump_forward.MAX_KNOWN", 2 if name == "thinking" else 4)
    async with lab.own(feature.model_dir, **feature.tree(1, 1)) as cluster:
        if feature.sections:  # there are answers to draft from
            await feature.check(cluster)
        ceiling = Ceiling(num_tokens)
        ceiling.arm(monkeypatch.setattr)
        answer = await moved(cluster, cluster.generate(**feature.requests[number]), ceiling)
        assert answer.ids == feature.expected[2 * number]


async def test_grammar_starts_after_the_marker(letters_dir: Path, lab: Lab) -> None:
    text = 'start: thinking answer\nthinking[suffix="</think>"]: /(?s:.*)/\nanswer: "yes, indeed"'
    grammar = Grammar(kind=GrammarKind.LARK, text=text)
    sampling = replace(_SAMPLED, stop_token_ids=(END,))
    async with lab.shared(letters_dir, **exact_tree(1, 1)) as cluster:
        answer = await cluster.generate(_PROMPTS[0], sampling, n=2, grammar=grammar, thinking=_budget(6))
        for tokens in answer.tokens.values():
            said = "".join(CHARACTERS[token.token_id] for token in tokens[:-1])
            assert said[6:] == "</think>yes, indeed" and tokens[-1].token_id == END


async def test_failing_grammar_fails_its_own_request_only(letters_dir: Path, lab: Lab) -> None:
    """Invalid and contradictory grammars fail their own request only.

    The first has no terminating token, the second is malformed. Two leave no allowed token together with the other
    options, one on the prefill replica and one on the decode replica.
    """
    sampled, short = replace(_SAMPLED, stop_token_ids=(END,)), Grammar(kind=GrammarKind.REGEX, text="a[bc]")
    malformed = Grammar(kind=GrammarKind.REGEX, text="(")
    followed = Grammar(kind=GrammarKind.REGEX, text="[a-c][1-9]{12,20}(xy|z){6,8}")
    torn = (TokenRules(allowed_token_ids=(_Z,)), TokenRules(bad_words=((_A, _B), (_A, _C))))
    async with lab.shared(letters_dir, **exact_tree(1, 1)) as cluster:
        failed, rejected, kept, free, *lost = await asyncio.gather(
            cluster.generate(_PROMPTS[0], replace(sampled, stop_token_ids=()), id="a", grammar=short),
            cluster.generate(_PROMPTS[1], sampled, id="b", grammar=malformed),
            cluster.generate(_PROMPTS[2], sampled, id="c", grammar=followed),
            cluster.generate(_PROMPTS[3], sampled, id="d"),
            *(
                cluster.generate(_PROMPTS[0], replace(sampled, token_rules=rules), id=str(i), grammar=short)
                for i, rules in enumerate(torn)
            ),
            return_exceptions=True,
        )
        assert [type(one) for one in lost] == [NoTokenAllowed] * 2
        assert isinstance(failed, GrammarNotFollowed)
        assert isinstance(rejected, RequestError) and rejected.param == "grammar"
        assert isinstance(kept, Answer) and isinstance(free, Answer)
        assert kept.tokens[0][-1].finish_reason is FinishReason.STOP
        assert re.fullmatch(followed.text, "".join(CHARACTERS[token] for token in kept.ids[:-1]))
