"""Sampler against naive definitions, independence of its choices from the batch, and scores of prompts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from core.types.request import Sampling, TokenRules
from engine.model import transformer
from engine.sampling import sampler
from engine.sampling.params import SamplingRow
from engine.sampling.prompt_scorer import Scorer
from engine.sampling.sampler import uniform
from engine.scheduler.prompt_scoring import ScoredRow
from tests.engine.scored_prompts import ScoredPrompts, check_scores
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.engine.tiny_models import DEEPSEEK_V3, MakeModel, MakeRunner

V = 40


def row(sampling: Sampling, *, seed: int = 0, prompt: list[int] | None = None, output: list[int] | None = None) -> Any:
    prompt, output = [1, 2, 3] if prompt is None else prompt, output or []
    return SamplingRow(sampling=sampling, seed=seed, tokens=prompt + output, num_prompt_tokens=len(prompt))


def sample(logits: torch.Tensor, rows: list[Any]) -> Any:
    """Sample from a copy of the logits, which the test reads again."""
    return sampler.sample(logits.clone(), rows).wait()


def random_logits(seed: int, rows: int = 1, vocabulary: int = V) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def naive_distribution(logits: np.ndarray, r: SamplingRow) -> np.ndarray:
    """Apply each rule by its definition, in fp64."""
    s, x = r.sampling, logits.astype(np.float64).copy()
    rules, output = s.token_rules or TokenRules(), tuple(r.tokens[r.num_prompt_tokens :])
    if rules.allowed_token_ids:
        x[[token for token in range(len(x)) if token not in rules.allowed_token_ids]] = -math.inf
    for word in rules.bad_words:
        if len(word) <= len(output) + 1 and (*output[len(output) + 1 - len(word) :], word[-1]) == word:
            x[word[-1]] = -math.inf
    for token, bias in rules.logit_bias:
        x[token] += bias
    for token in set(r.tokens):
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    for token, count in Counter(r.tokens[r.num_prompt_tokens :]).items():
        x[token] -= s.presence_penalty + s.frequency_penalty * count
    if len(r.tokens) - r.num_prompt_tokens < s.min_tokens:
        x[list(s.stop_token_ids)] = -math.inf
    p = np.exp((x - x.max()) / s.temperature)
    p /= p.sum()
    if s.top_k:
        p[p < np.sort(p)[::-1][min(s.top_k, len(p)) - 1]] = 0
        p /= p.sum()
    if s.top_p < 1:
        order = np.argsort(-p)
        num_kept = int(np.searchsorted(np.cumsum(p[order]), s.top_p)) + 1
        p[order[num_kept:]] = 0
        p /= p.sum()
    p[p < s.min_p * p.max()] = 0
    return p / p.sum()


# Tokens 1 and 39 are neither forbidden nor too early.
rules = st.one_of(
    st.none(),
    st.builds(
        TokenRules,
        logit_bias=st.sampled_from([(), ((3, 5.0), (9, -100.0), (39, 2.5)), ((30, 100.0),)]),
        allowed_token_ids=st.sampled_from([(), (1, 5, 9, 30, 31, 39)]),
        bad_words=st.sampled_from([(), ((9,), (30, 31)), ((4, 5, 30), (5, 30), (31,))]),
    ),
)
samplings = st.builds(
    Sampling,
    temperature=st.floats(0.1, 3.0),
    top_k=st.sampled_from([0, 1, 3, 10, 100]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1, 0.001]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, -1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 0.8]),
    min_tokens=st.sampled_from([0, 2, 50]),
    stop_token_ids=st.sampled_from([(), (3,), (0, 5, 7)]),
    token_rules=rules,
)
histories = st.lists(st.integers(0, V - 1), max_size=12)


@settings(max_examples=2 * settings().max_examples)
@given(sampling=samplings, prompt=histories, output=histories, seed=st.integers(0, 2**63 - 1))
def test_the_draw_is_the_inverse_of_the_naive_distribution(
    sampling: Sampling, prompt: list[int], output: list[int], seed: int
) -> None:
    logits = random_logits(seed % 1000)
    r = row(sampling, seed=seed, prompt=prompt, output=output)
    p = naive_distribution(logits[0].numpy(), r)
    token = sample(logits, [r])[0][0]
    below, u = p[:token].sum(), uniform(seed, len(r.tokens))
    assert p[token] > 0
    assert below - 1e-5 <= u <= below + p[token] + 1e-5


@given(
    sampling=samplings, others=st.lists(samplings, max_size=4), greedy=st.integers(0, 2), seed=st.integers(0, 2**63 - 1)
)
def test_a_choice_does_not_depend_on_the_batch(
    sampling: Sampling, others: list[Sampling], greedy: int, seed: int
) -> None:
    mine = row(sampling, seed=seed, output=[4, 5, 4])
    rest = [row(s, seed=i, output=[7]) for i, s in enumerate(others)] + [row(Sampling(temperature=0.0))] * greedy
    logits = random_logits(seed % 1000, rows=1 + len(rest))
    alone = sample(logits[:1], [mine])[0]
    assert sample(logits, [mine, *rest])[0] == alone
    assert sample(logits.flip(0), [*rest[::-1], mine])[-1] == alone


@pytest.mark.parametrize(
    ("sampling", "theirs"),
    [
        (Sampling(repetition_penalty=1.7), [RepetitionPenaltyLogitsProcessor(1.7)]),
        (Sampling(temperature=0.6, top_k=7), [TemperatureLogitsWarper(0.6), TopKLogitsWarper(7)]),
        (Sampling(temperature=1.4, top_p=0.8), [TemperatureLogitsWarper(1.4), TopPLogitsWarper(0.8)]),
        (Sampling(top_p=0.9, min_p=0.2), [TopPLogitsWarper(0.9), MinPLogitsWarper(0.2)]),
    ],
    ids=["repetition", "top-k", "top-p", "top-p then min-p"],
)
def test_filters_are_those_of_transformers(sampling: Sampling, theirs: list[Any]) -> None:
    for seed in range(20):
        logits, r = random_logits(seed), row(sampling, prompt=[1, 9, 9], output=[30])
        scores = logits.clone()
        for process in theirs:
            scores = process(torch.tensor([r.tokens]), scores)
        expected = scores.softmax(dim=-1)[0].double().numpy()
        np.testing.assert_allclose(naive_distribution(logits[0].numpy(), r), expected, atol=1e-6)


def test_draws_are_uniform_and_stable() -> None:
    draws = [uniform(seed, position) for seed in range(50) for position in range(100)]
    assert len(set(draws)) == len(draws)
    counts, _ = np.histogram(draws, bins=10, range=(0, 1))
    assert counts.min() > 420 and counts.max() < 580
    assert uniform(1, 2) == 0.40645450820365525  # must be the same in every version


def test_a_choice_depends_on_seed_and_position_only() -> None:
    logits, sampling = random_logits(0).div(3), Sampling()
    by_seed = {sample(logits, [row(sampling, seed=s)])[0][0] for s in range(40)}
    by_position = {sample(logits, [row(sampling, output=[5] * n)])[0][0] for n in range(40)}
    assert len(by_seed) > 10 and len(by_position) > 10
    # The draw does not distinguish prompt and generated tokens, so a migrated request continues unchanged.
    assert sample(logits, [row(sampling, prompt=[1, 2, 3, 4])]) == sample(logits, [row(sampling, output=[4])])


def test_equal_tokens_stay_or_go_together() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0, 0.0]])
    for sampling in (Sampling(top_k=2), Sampling(top_p=0.4)):
        assert {sample(logits, [row(sampling, seed=s, prompt=[])])[0][0] for s in range(60)} == {1, 2, 3}


def test_nucleus_wider_than_first_top_k() -> None:
    """Nine tenths of a nearly flat distribution are more tokens than the first top-k covers."""
    logits = torch.linspace(0, 1, 5000).expand(2, -1)
    rows = [row(Sampling(top_p=0.9), seed=1), row(Sampling(top_p=0.001), seed=2)]
    for r, (token, _) in zip(rows, sample(logits, rows), strict=True):
        p = naive_distribution(logits[0].numpy(), r)
        assert p[:token].sum() - 1e-5 <= uniform(r.seed, len(r.tokens)) <= p[: token + 1].sum() + 1e-5


@pytest.mark.parametrize(("draw", "chosen"), [(0.0, 2), (1 - 2.0**-48, 4)])
def test_extreme_draws_choose_allowed_tokens(draw: float, chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda seed, position: draw)
    logits = torch.tensor([[-9.0, -9.0, 1.0, 1.1, 1.2, -9.0]])
    assert sample(logits, [row(Sampling(top_k=3))])[0][0] == chosen


@pytest.mark.parametrize("wanted", [Sampling(temperature=0.9, top_p=0.8, num_logprobs=2), Sampling(temperature=0.0)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_row_gets_no_token_alone(bad: float, wanted: Sampling) -> None:
    logits = random_logits(3, rows=3)
    alone = sample(logits[1:2], [row(wanted, seed=5)])
    logits[0] = bad
    logits[2, 7] = -math.inf if bad == -math.inf else bad  # a single -inf is valid
    none, beside, last = sample(logits, [row(wanted, seed=4), row(wanted, seed=5), row(wanted, seed=6)])
    assert none is None and [beside] == alone
    assert (last is None) == (bad != -math.inf)


class FakeMask:
    """TokenMask that allows one token."""

    failure = ""

    def __init__(self, token_id: int) -> None:
        self._words = np.zeros((V + 31) // 32, dtype=np.int32)
        self._words[token_id >> 5] = 1 << (token_id & 31)

    def may_forbid(self, tokens: Any, start: int, num_in_flight: int) -> bool:
        return True

    def allowed(self, tokens: Any, start: int) -> Any:
        return self._words

    def only(self, tokens: Any, start: int) -> None:
        return None

    def fork(self) -> FakeMask:
        return self


_ALLOWED = TokenRules(allowed_token_ids=(5, 6), logit_bias=((6, 3.0),))
TOO_MUCH = {
    "bad words": (Sampling(token_rules=replace(_ALLOWED, bad_words=((5,), (3, 6)))), None),
    "too early": (Sampling(token_rules=_ALLOWED, min_tokens=9, stop_token_ids=(5, 6)), None),
    "mask": (Sampling(token_rules=_ALLOWED, temperature=0.0), FakeMask(7)),
    "mask, too early": (Sampling(min_tokens=9, stop_token_ids=(7,)), FakeMask(7)),
    "mask and bad words": (Sampling(token_rules=TokenRules(bad_words=((7,),)), num_logprobs=1), FakeMask(7)),
}


@pytest.mark.parametrize(("asked", "mask"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_contradictory_row_is_marked_alone(asked: Sampling, mask: FakeMask | None) -> None:
    wanted, logits = Sampling(token_rules=_ALLOWED), random_logits(4, rows=4)
    lost, beside, sick, plain = (row(one, output=[3]) for one in (asked, wanted, wanted, Sampling(temperature=0.0)))
    lost.mask = mask
    alone = [sample(logits[i : i + 1], [r])[0] for i, r in ((1, beside), (3, plain))]
    logits[2] = math.nan
    none, *rest = sample(logits, [lost, beside, sick, plain])
    assert none is None and lost.is_contradicted
    assert rest == [alone[0], None, alone[1]]
    assert not sick.is_contradicted, "the cause is the model, not the constraints"


def test_mask_and_token_rules_combine() -> None:
    logits = random_logits(5)
    both = row(Sampling(temperature=0.0, token_rules=TokenRules(logit_bias=((6, 100.0),), bad_words=((8,),))))
    assert sample(logits, [both])[0][0] == 6
    both.mask = FakeMask(7)
    assert sample(logits, [both])[0][0] == 7


def test_extreme_temperatures() -> None:
    logits = random_logits(3)
    best = int(logits.argmax())
    assert sample(logits, [row(Sampling(temperature=0.0))])[0][0] == best
    assert sample(logits, [row(Sampling(temperature=1e-30), seed=5)])[0][0] == best
    assert len({sample(logits, [row(Sampling(temperature=1e30), seed=s)])[0][0] for s in range(50)}) > 20


class CountedIds(tuple[int, ...]):
    """List that counts how often it is read."""

    num_reads = 0

    def __iter__(self) -> Iterator[int]:
        CountedIds.num_reads += 1
        return super().__iter__()


def test_stop_tokens_are_converted_once_per_choice() -> None:
    """Not in each step: a request may have a thousand of them, and all rows would wait."""
    CountedIds.num_reads = 0
    stops = CountedIds([*range(V - 1), -1, V, V + 5])  # may include ids outside the vocabulary
    rows = [row(Sampling(min_tokens=100, stop_token_ids=stops), seed=choice) for choice in range(4)]
    for _ in range(10):
        assert [chosen[0] for chosen in sample(random_logits(3, rows=4), rows)] == [V - 1] * 4
    assert CountedIds.num_reads <= len(rows)


def test_greedy_obeys_penalties_and_min_tokens() -> None:
    logits = torch.zeros(1, V)
    logits[0, [7, 8, 9]] = torch.tensor([3.0, 2.0, 1.0])
    greedy = {"temperature": 0.0}
    assert sample(logits, [row(Sampling(**greedy, min_tokens=2, stop_token_ids=(7, 8)), output=[1])])[0][0] == 9
    assert sample(logits, [row(Sampling(**greedy, min_tokens=2, stop_token_ids=(7, 8)), output=[1, 1])])[0][0] == 7
    assert sample(logits, [row(Sampling(**greedy, frequency_penalty=0.6), output=[7, 7])])[0][0] == 8
    assert sample(logits, [row(Sampling(**greedy, presence_penalty=0.6), output=[7, 7])])[0][0] == 7
    assert sample(logits, [row(Sampling(**greedy, presence_penalty=1.5), prompt=[7])])[0][0] == 7
    assert sample(logits, [row(Sampling(**greedy, repetition_penalty=1.6), prompt=[7])])[0][0] == 8


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    logits = random_logits(1, rows=3)
    rules = TokenRules(logit_bias=((4, 9.0),), allowed_token_ids=(2, 4, 5), bad_words=((2,),))
    wanted = Sampling(temperature=0.2, top_k=1, repetition_penalty=2.0, num_logprobs=4, token_rules=rules)
    rows = [row(wanted), row(Sampling(temperature=0.0)), row(Sampling(temperature=0.0, num_logprobs=0))]
    (token, logprob), (_, none), (best, only) = sample(logits, rows)
    expected = logits.log_softmax(dim=-1)
    assert logprob is not None and logprob.logprob == pytest.approx(float(expected[0, token]), abs=1e-5)
    assert [i for i, _ in logprob.top] == expected[0].topk(4).indices.tolist()
    np.testing.assert_allclose([p for _, p in logprob.top], expected[0].topk(4).values, atol=1e-5)
    assert none is None
    assert only is not None and only.top == () and only.logprob == pytest.approx(float(expected[2, best]), abs=1e-5)


@pytest.mark.parametrize(("family", "max_batch_tokens"), [("llama", 7), ("llama", 200), ("deepseek_v3", 13)])
def test_scores_equal_transformers_with_chunks_and_warm_cache(
    family: str, max_batch_tokens: int, tiny_model: MakeModel, make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformer, "SLICE_BYTES", 4 * VOCAB_SIZE * 5)  # five positions per slice
    directory, model = tiny_model(family, **(DEEPSEEK_V3 if family == "deepseek_v3" else {}))
    engine = ScoredPrompts(make_runner(directory), max_batch_tokens=max_batch_tokens)
    first, second, third, one = prompts(30, 33, 17, 1)
    for n in (1, 2):
        results = engine.tell([(first, 3), (second, None), (third, 0), (one, 2), (first[:-1], 1)], n=n)
        for tokens, num_top, each in ((first, 3, results[0]), (third, 0, results[2]), (first[:-1], 1, results[4])):
            check_scores(each, model, tokens, num_top, within=2e-4)
        assert len(results[1]) == len(results[3]) == 0, "expected no scores: not requested, or a prompt of one token"
    cached = list(engine.cached.values())
    assert cached[1] == 32 and not cached[0] and not cached[4], "only unscored prompts may reuse cached blocks"


def test_non_finite_row_has_no_scores_alone() -> None:
    scorer = Scorer([ScoredRow(0, [1, 2], 1), ScoredRow(2, [3], 2)])
    scorer.add(torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, float("nan"), 0.0, 0.0]]))
    scorer.add(torch.tensor([[0.0, float("-inf"), 5.0, 5.0]]))
    bad, good = scorer.scores()
    assert bad is None and good is not None
    assert good.ranks_P.tolist() == [1] and sorted(good.top_ids_PK[0].tolist()) == [2, 3]
    assert good.logprobs_P[0] == good.top_logprobs_PK[0, 0] == good.top_logprobs_PK[0, 1], (
        "the same token must have the same logprob in both lists"
    )
