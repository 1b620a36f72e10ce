"""Answers are token for token those without drafts, whoever guesses, and whatever is asked."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
import torch
from numpy.testing import assert_allclose

from cluster.grammar.compiler import CompiledGrammar, GrammarCompiler
from cluster.words.grammar import Grammar, GrammarKind
from cluster.words.request import SampledToken, Sampling
from cluster.words.token_rules import TokenRules
from engine.cpu.library import open_kernels
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.prompts import Prompt
from engine.runner import ModelRunner
from engine.sampler import sample
from engine.sampling import SamplingRow
from engine.sequence import Sequence
from engine.speculation.proposer import Proposer
from engine.speculation.speculation import Speculation
from tests.character_tokenizer import END, save_tokenizer
from tests.engine.asked import AMPLE, Asked, Said, answers, num_accepted, sequence_of, thinking
from tests.engine.speculation.proposers import OURS, FakeProposer
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.engine.tiny_models import MakeModel, MakeRunner

pytestmark = pytest.mark.usefixtures("one_thread")

_SMALL = SchedulerConfig(max_batch_tokens=48, max_running=24, max_waiting=32)
_RULES = TokenRules(logit_bias=((5, 4.0), (6, -9.0)), bad_words=((5, 5), (7,)))
_SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "0.7": Sampling(temperature=0.7, seed=1),
    "1.0": Sampling(temperature=1.0, seed=2, top_p=0.95),
    "top-k": Sampling(temperature=1.0, seed=3, top_k=5, min_p=0.05),
    "penalties": Sampling(temperature=0.7, seed=4, presence_penalty=1.2, frequency_penalty=0.3, repetition_penalty=1.3),
    "rules": Sampling(temperature=1.0, seed=5, token_rules=_RULES),
    "bias": Sampling(temperature=0.0, token_rules=TokenRules(logit_bias=((5, 4.0),))),
    "logprobs": Sampling(temperature=1.0, seed=6, num_logprobs=3),
    "stops": Sampling(temperature=1.0, seed=7, min_tokens=6, stop_token_ids=tuple(range(0, VOCAB_SIZE, 4))),
    "logprobs, penalties": Sampling(temperature=0.0, num_logprobs=0, repetition_penalty=1.2),
}


@pytest.fixture(scope="module")
def grammar(tmp_path_factory: pytest.TempPathFactory) -> CompiledGrammar:
    directory = tmp_path_factory.mktemp("letters")
    save_tokenizer(directory)
    return GrammarCompiler(directory, vocab_size=VOCAB_SIZE).compile(
        Grammar(kind=GrammarKind.REGEX, text="(a|b|c){4,9}, and so on[0-9]{2,7}")
    )


@pytest.fixture
def runner(tiny_model: MakeModel, make_runner: MakeRunner) -> ModelRunner:
    return make_runner(tiny_model("llama")[0], num_blocks=512)


@pytest.fixture
def asked(grammar: CompiledGrammar) -> list[Asked]:
    """One of each kind, beside one that keeps to a grammar, and one that thinks for some tokens and no longer; every
    second with two choices."""
    every = prompts(*(9 + 5 * i for i in range(len(_SAMPLINGS) + 2)))
    found = [
        Asked(prompt, replace(sampling, max_tokens=14 + i), num_choices=1 + i % 2)
        for i, (prompt, sampling) in enumerate(zip(every, _SAMPLINGS.values(), strict=False))
    ]
    bound = Sampling(max_tokens=30, temperature=1.0, seed=8, stop_token_ids=(END,))
    thinks = Asked(every[-2], Sampling(max_tokens=30, temperature=1.0, seed=9), thinking=thinking(10))
    return [*found, thinks, Asked(every[-1], bound, grammar, num_choices=2)]


def _speculation(**methods: Proposer) -> Speculation:
    return Speculation(methods, max_tokens=6, vocab_size=VOCAB_SIZE)


class Oracle:
    """Who knows some answers to some prompts: as often as `is_right` says of a position."""

    def __init__(self, said: Said, asked: Seq[Asked], is_right: Callable[[int], bool] = lambda position: True) -> None:
        self._whole = [
            [*asked[int(id)].prompt, *(token.token_id for token in tokens)] for (id, _), tokens in said.tokens.items()
        ]
        self._is_right = is_right

    def __call__(self, tokens: Seq[int], max_tokens: int) -> list[int]:
        for whole in self._whole:
            if whole[: len(tokens)] == list(tokens):
                wanted = range(len(tokens), min(len(whole), len(tokens) + max_tokens))
                return [whole[i] if self._is_right(i) else (whole[i] + 1) % VOCAB_SIZE for i in wanted]
        return [0] * max_tokens


def _compare(found: Said, expected: Said, *, atol: float = 1e-4) -> None:
    assert (found.ids, found.failures) == (expected.ids, expected.failures)
    for key, tokens in found.tokens.items():
        for ours, theirs in zip(tokens, expected.tokens[key], strict=True):
            assert ours.finish_reason == theirs.finish_reason
            _compare_logprobs(ours, theirs, atol=atol)


def _compare_logprobs(ours: SampledToken, theirs: SampledToken, *, atol: float) -> None:
    assert bool(ours.logprob) == bool(theirs.logprob)
    if ours.logprob and theirs.logprob:
        assert [id for id, _ in ours.logprob.top] == [id for id, _ in theirs.logprob.top]
        ours_told = [ours.logprob.logprob, *(value for _, value in ours.logprob.top)]
        assert_allclose(ours_told, [theirs.logprob.logprob, *(value for _, value in theirs.logprob.top)], atol=atol)


@pytest.mark.parametrize("name", [*OURS, "auto"])
def test_ours_change_nothing(name: str, runner: ModelRunner, asked: list[Asked]) -> None:
    expected = answers(runner, asked)
    makers = OURS if name == "auto" else {name: OURS[name]}
    speculation = _speculation(**{method: make() for method, make in makers.items()})
    for _ in range(2):  # the second time, the first one's answers are known
        _compare(answers(runner, asked, speculation=speculation), expected)
    assert any(counts.drafted for counts in speculation.counts.values())
    assert name == "ngram" or num_accepted(speculation) > 50


@pytest.mark.parametrize("every", [1, 2, 3, 7])
@pytest.mark.parametrize("num_blocks", [512, 48])
def test_drafts_that_are_right_but_for_some_change_nothing(
    every: int, num_blocks: int, runner: ModelRunner, asked: list[Asked]
) -> None:
    """In small steps, and in a pool where some are preempted."""
    expected = answers(runner, asked)
    speculation = _speculation(oracle=FakeProposer(Oracle(expected, asked, lambda i: every == 1 or i % every > 0)))
    found = answers(runner, asked, _SMALL, num_blocks, speculation=speculation)
    _compare(found, expected)
    assert found.num_accepted > 40
    assert bool(found.num_preemptions) == (num_blocks == 48)


def test_right_drafts_take_fewer_steps_and_each_row_its_own(runner: ModelRunner) -> None:
    ask = [Asked(prompt, Sampling(max_tokens=29, temperature=0.7, seed=1)) for prompt in prompts(11, 12)]
    expected = answers(runner, ask)
    speculation = _speculation(oracle=FakeProposer(Oracle(expected, ask)))
    found = answers(runner, ask, speculation=speculation)
    _compare(found, expected)
    assert expected.num_steps == 29 and found.num_steps == 1 + 4  # 28 tokens, 7 a step
    assert found.num_accepted == 2 * 24
    counts = speculation.counts["oracle"]
    assert counts.drafted == counts.accepted == {place: 8 for place in range(6)}


@pytest.mark.parametrize("max_tokens", range(1, 12))
@pytest.mark.parametrize("asking", ["length", "stop"])
def test_an_answer_that_ends_within_a_draft_ends_there(asking: str, max_tokens: int, runner: ModelRunner) -> None:
    free = Asked(prompts(11)[0], Sampling(max_tokens=20, temperature=1.0, seed=1))
    whole = answers(runner, [free])
    if asking == "stop":
        sampling = replace(free.sampling, stop_token_ids=(whole.ids[0][max_tokens],))
    else:
        sampling = replace(free.sampling, max_tokens=max_tokens)
    ask = [replace(free, sampling=sampling)]
    proposer = FakeProposer(Oracle(whole, [free]))
    expected, found = answers(runner, ask), answers(runner, ask, speculation=_speculation(oracle=proposer))
    _compare(found, expected)
    assert proposer.finished_with == [[*free.prompt, *expected.ids[0]]]


def test_a_wrong_number_for_a_position_is_seen(
    runner: ModelRunner, asked: list[Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(runner, asked)
    behind = SamplingRow.behind
    monkeypatch.setattr(SamplingRow, "behind", lambda row, num_drafted: behind(row, num_drafted - 1))
    speculation = _speculation(oracle=FakeProposer(Oracle(expected, asked)))
    assert answers(runner, asked, speculation=speculation).ids != expected.ids


def test_who_comes_late_or_leaves_early_changes_nothing(runner: ModelRunner, asked: list[Asked]) -> None:
    expected = answers(runner, asked)
    proposer = FakeProposer(Oracle(expected, asked, lambda i: i % 5 > 0))
    blocks = BlockManager(200)
    engine = Engine(
        runner, sample, blocks, AMPLE, block_size=runner.layout.block_size, speculation=_speculation(oracle=proposer)
    )
    got: dict[tuple[str, int], list[int]] = {}
    left: set[str] = set()
    waiting = [Prompt(sequence_of(one, str(i), block_size=runner.layout.block_size)) for i, one in enumerate(asked)]
    num_steps = 0
    running: dict[str, list[Sequence]] = {}
    while waiting or engine.num_running or engine.num_waiting:
        if waiting and num_steps % 2 == 0:
            engine.add(waiting.pop(0))
        result = engine.step()
        num_steps += 1
        for prefilled in result.prefilled:
            running[prefilled.prompt.sequence.request.id] = prefilled.sequences
        first = [pair for p in result.prefilled for pair in zip(p.sequences, p.tokens, strict=True)]
        for sequence, token in (*first, *result.sampled):
            got.setdefault((sequence.request.id, sequence.choice), []).append(token.token_id)
        if num_steps % 5 == 0 and running:
            id, sequences = running.popitem()
            left.add(id)
            for sequence in sequences:
                engine.end(sequence)
        blocks.check_integrity()
    assert blocks.num_available == 200 and len(left) > 2
    for (id, choice), tokens in got.items():
        whole = [token.token_id for token in expected.tokens[id, choice]]
        assert tokens == (whole[: len(tokens)] if id in left else whole)


@pytest.mark.skipif(
    open_kernels(dtype=torch.bfloat16, device=torch.device("cpu")) is None, reason="no C++ compiler here"
)
def test_where_answers_are_deterministic_they_stay_so_bit_for_bit(
    tiny_model: MakeModel, make_runner: MakeRunner, asked: list[Asked]
) -> None:
    runner = make_runner(tiny_model("llama")[0], num_blocks=512, dtype="bfloat16", deterministic=True)
    expected = answers(runner, asked)
    speculation = _speculation(oracle=FakeProposer(Oracle(expected, asked, lambda i: i % 4 > 0)))
    for config, num_blocks in ((AMPLE, 512), (_SMALL, 48)):
        found = answers(runner, asked, config, num_blocks, speculation=speculation)
        assert found.tokens == expected.tokens, "tokens and log-probabilities"
    assert num_accepted(speculation) > 80


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "deepseek_v3"])
def test_of_other_families_too(family: str, tiny_model: MakeModel, make_runner: MakeRunner, asked: list[Asked]) -> None:
    runner = make_runner(tiny_model(family)[0], num_blocks=512)
    expected = answers(runner, asked)
    speculation = _speculation(oracle=FakeProposer(Oracle(expected, asked, lambda i: i % 3 > 0)))
    # Latents of one query are attended to in another order than those of several: their float32 rounds more.
    _compare(answers(runner, asked, speculation=speculation), expected, atol=1e-3 if "deepseek" in family else 1e-4)
    assert num_accepted(speculation) > 40
