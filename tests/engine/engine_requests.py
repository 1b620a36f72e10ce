"""Requests to an in-process engine, some constrained by a grammar, and their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from numpy.testing import assert_allclose
from torch import Tensor

from core.grammar.compiler import CompiledGrammar, GrammarCompiler
from core.grammar.mask import ThinkingMask
from core.types.request import Grammar, GrammarKind, SampledToken, Sampling, SequenceRequest, ThinkingBudget, TokenRules
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.kv.pool import window_manager_of
from engine.runner.runner import ModelRunner
from engine.sampling.sampler import sample
from engine.scheduler.prompts import Prompt
from engine.scheduler.sequence import Sequence as TokenSequence
from engine.scheduler.step import ScheduledStep
from engine.scheduler.step_commands import Orders
from engine.spec_decode.speculation import Speculation
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.support.character_tokenizer import END, save_tokenizer

AMPLE = SchedulerConfig(max_batch_tokens=512, max_running=32, max_waiting=32)


@dataclass
class Asked:
    """One request."""

    prompt: list[int]
    sampling: Sampling
    grammar: CompiledGrammar | None = None
    num_choices: int = 1
    thinking: ThinkingMask | None = None  # without a grammar


@dataclass
class AnswerText:
    """Results of several requests: the tokens of each choice, by (request, choice)."""

    tokens: dict[tuple[str, int], list[SampledToken]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    num_steps: int = 0
    num_known: int = 0
    num_preemptions: int = 0
    num_accepted: int = 0  # accepted draft tokens
    num_cached: int = 0  # tokens of prompts found in the cache
    num_device_tokens: int = 0  # tokens computed before the host knew them

    @property
    def ids(self) -> list[list[int]]:
        return [[token.token_id for token in self.tokens[key]] for key in sorted(self.tokens)]


def answers(
    runner: ModelRunner,
    asked: Sequence[Asked],
    config: SchedulerConfig = AMPLE,
    num_blocks: int = 512,
    *,
    is_async: bool = False,
    speculation: Speculation | Callable[[BlockManager], Speculation] | None = None,
) -> AnswerText:
    outputs, blocks = AnswerText(), blocks_of(runner, num_blocks, max_batch_tokens=config.max_batch_tokens)
    if speculation is not None and not isinstance(speculation, Speculation):
        speculation = speculation(blocks)
    bounded = _Bounded(runner, config.max_batch_tokens)
    engine = Engine(
        bounded, sample, blocks, config, block_size=runner.layout.block_size, is_async=is_async, speculation=speculation
    )
    for number, one in enumerate(asked):
        engine.add(Prompt(sequence_of(one, str(number), block_size=runner.layout.block_size)))
    while (result := engine.step()).did_work:
        outputs.num_steps += 1
        outputs.num_known += result.num_known
        outputs.num_cached += sum(prefilled.prompt.num_cached for prefilled in result.prefilled)
        first = [pair for p in result.prefilled for pair in zip(p.sequences, p.tokens, strict=True)]
        for sequence, token in (*first, *result.sampled):
            outputs.tokens.setdefault((sequence.request.id, sequence.choice), []).append(token)
        for sequence in result.failed:
            outputs.failures[sequence.request.id] = type(sequence.failure).__name__
        blocks.check_integrity()
    assert blocks.num_available == num_blocks
    if windows := blocks.windows:
        assert (windows.num_available, windows.num_reserved) == (windows.num_parts - 1, 0)
    outputs.num_accepted = num_accepted(speculation) if speculation else 0
    outputs.num_preemptions, outputs.num_device_tokens = engine.decoding.num_preemptions, bounded.num_device_tokens
    return outputs


def blocks_of(runner: ModelRunner, num_blocks: int, *, max_batch_tokens: int) -> BlockManager:
    """Return a block manager for a runner's pool, of which it uses only `num_blocks` blocks."""
    windows = window_manager_of(runner.pool, max_batch_tokens=max_batch_tokens)
    return BlockManager(num_blocks, num_states=runner.pool.num_states, windows=windows)


class Oracle:
    """Proposer that knows the answers to some prompts, and is right where `is_right` returns True for the position."""

    def __init__(
        self, outputs: AnswerText, asked: Sequence[Asked], is_right: Callable[[int], bool] = lambda position: True
    ) -> None:
        self._whole = [
            [*asked[int(id)].prompt, *(token.token_id for token in tokens)]
            for (id, _), tokens in outputs.tokens.items()
        ]
        self._is_right = is_right

    def __call__(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        for whole in self._whole:
            if whole[: len(tokens)] == list(tokens):
                wanted = range(len(tokens), min(len(whole), len(tokens) + max_tokens))
                return [whole[i] if self._is_right(i) else (whole[i] + 1) % VOCAB_SIZE for i in wanted]
        return [0] * max_tokens


def num_accepted(speculation: Speculation) -> int:
    return sum(counts.accepted.total() for counts in speculation.counts.values())


class _Bounded:
    """Runner for steps of a limited number of tokens, at least one per row."""

    def __init__(self, runner: ModelRunner, max_tokens: int) -> None:
        self._runner, self._max_tokens = runner, max_tokens
        self.num_device_tokens = 0

    def execute(self, step: ScheduledStep | None, orders: Orders, /) -> Tensor | None:
        assert step is None or step.num_tokens <= max(self._max_tokens, len(step.decoding))
        self.num_device_tokens += len(step.device_tokens.sources) if step and step.device_tokens else 0
        return self._runner.execute(step, orders)


def sequence_of(one: Asked, id: str, *, block_size: int) -> TokenSequence:
    request = SequenceRequest(
        id=id,
        token_ids=tuple(one.prompt),
        num_prompt_tokens=len(one.prompt),
        sampling=one.sampling,
        choices=tuple(range(one.num_choices)),
    )
    sequence = TokenSequence(request, 0, model="m", block_size=block_size, max_context=128)
    if one.grammar:
        sequence.sampling_row.mask = one.grammar.mask(one.sampling.stop_token_ids)
    if one.thinking:
        sequence.sampling_row.mask = one.thinking.fork()
    return sequence


def thinking(num_tokens: int, *, is_open: bool = True) -> ThinkingMask:
    """Return the mask of an answer without a grammar; its thinking ends with the first eight tokens."""
    marker = "<[end]>!"
    budget = ThinkingBudget(
        num_tokens=num_tokens, is_open=is_open, opening="<", closing=marker, closing_ids=tuple(range(len(marker)))
    )

    def bytes_of(token_id: int) -> bytes:
        return marker[token_id].encode() if token_id < len(marker) else b"."

    return ThinkingMask(budget, bytes_of=bytes_of, vocab_size=VOCAB_SIZE)


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


LETTERS = Grammar(kind=GrammarKind.REGEX, text="(a|b|c){4,9}, and so on[0-9]{2,7}")


def letters_grammar(directory: Path) -> CompiledGrammar:
    """Compile LETTERS with a tokenizer that is written to `directory`."""
    save_tokenizer(directory)
    return GrammarCompiler(directory, vocab_size=VOCAB_SIZE).compile(LETTERS)


def one_of_each_kind(grammar: CompiledGrammar) -> list[Asked]:
    """Return requests of every kind, with a grammar and with bounded thinking; every second one has two choices."""
    every = prompts(*(9 + 5 * i for i in range(len(_SAMPLINGS) + 2)))
    found = [
        Asked(prompt, replace(sampling, max_tokens=14 + i), num_choices=1 + i % 2)
        for i, (prompt, sampling) in enumerate(zip(every, _SAMPLINGS.values(), strict=False))
    ]
    bound = Sampling(max_tokens=30, temperature=1.0, seed=8, stop_token_ids=(END,))
    thinks = Asked(every[-2], Sampling(max_tokens=30, temperature=1.0, seed=9), thinking=thinking(10))
    return [*found, thinks, Asked(every[-1], bound, grammar, num_choices=2)]


def compare(found: AnswerText, expected: AnswerText, *, atol: float = 1e-4) -> None:
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


def check_with_leavers(
    runner: ModelRunner,
    asked: Sequence[Asked],
    expected: AnswerText,
    speculation: Speculation | None,
    *,
    blocks: BlockManager,
    is_async: bool = False,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Add a request every second step and cancel one every fifth, and check the answers.

    Requests that stay get all expected tokens, cancelled ones a prefix, and no block is lost.
    """
    num_free = blocks.num_available
    engine = Engine(
        runner, sample, blocks, AMPLE, block_size=runner.layout.block_size, speculation=speculation, is_async=is_async
    )
    got: dict[tuple[str, int], list[int]] = {}
    left: set[str] = set()
    waiting = [Prompt(sequence_of(one, str(i), block_size=runner.layout.block_size)) for i, one in enumerate(asked)]
    num_steps = 0
    running: dict[str, list[TokenSequence]] = {}
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
        after_step()
    assert blocks.num_available == num_free and len(left) > 2
    for (id, choice), tokens in got.items():
        whole = [token.token_id for token in expected.tokens[id, choice]]
        assert tokens == (whole[: len(tokens)] if id in left else whole)
