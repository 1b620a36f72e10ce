"""Requests to an engine in this process, some of which keep to a grammar, and all that comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from cluster.grammar.compiler import CompiledGrammar
from cluster.grammar.thinking_mask import ThinkingMask
from cluster.words.request import SampledToken, Sampling, SequenceRequest
from cluster.words.thinking_budget import ThinkingBudget
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.orders import Orders
from engine.prompts import Prompt
from engine.runner import ModelRunner
from engine.sampler import sample
from engine.sequence import Sequence as TokenSequence
from engine.speculation.speculation import Speculation
from engine.step import ScheduledStep
from tests.engine.steps import VOCAB_SIZE

AMPLE = SchedulerConfig(max_batch_tokens=512, max_running=32, max_waiting=32)


@dataclass
class Asked:
    """One request."""

    prompt: list[int]
    sampling: Sampling
    grammar: CompiledGrammar | None = None
    num_choices: int = 1
    thinking: ThinkingMask | None = None  # around no grammar


@dataclass
class Said:
    """What came of several: the tokens of each choice, by (request, choice)."""

    tokens: dict[tuple[str, int], list[SampledToken]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    num_steps: int = 0
    num_known: int = 0
    num_preemptions: int = 0
    num_accepted: int = 0  # tokens that were drafted
    num_fed: int = 0  # tokens that were computed before the host knew them

    @property
    def ids(self) -> list[list[int]]:
        return [[token.token_id for token in self.tokens[key]] for key in sorted(self.tokens)]


def answers(
    runner: ModelRunner,
    asked: Sequence[Asked],
    config: SchedulerConfig = AMPLE,
    num_blocks: int = 512,
    *,
    runs_ahead: bool = False,
    speculation: Speculation | None = None,
) -> Said:
    said, blocks = Said(), BlockManager(num_blocks)
    bounded = _Bounded(runner, config.max_batch_tokens)
    engine = Engine(
        bounded,
        sample,
        blocks,
        config,
        block_size=runner.layout.block_size,
        runs_ahead=runs_ahead,
        speculation=speculation,
    )
    for number, one in enumerate(asked):
        engine.add(Prompt(sequence_of(one, str(number), block_size=runner.layout.block_size)))
    while (result := engine.step()).did_work:
        said.num_steps += 1
        said.num_known += result.num_known
        first = [pair for p in result.prefilled for pair in zip(p.sequences, p.tokens, strict=True)]
        for sequence, token in (*first, *result.sampled):
            said.tokens.setdefault((sequence.request.id, sequence.choice), []).append(token)
        for sequence in result.failed:
            said.failures[sequence.request.id] = type(sequence.failure).__name__
        blocks.check_integrity()
    assert blocks.num_available == num_blocks
    said.num_accepted = num_accepted(speculation) if speculation else 0
    said.num_preemptions, said.num_fed = engine.decoding.num_preemptions, bounded.num_fed
    return said


def num_accepted(speculation: Speculation) -> int:
    return sum(counts.accepted.total() for counts in speculation.counts.values())


class _Bounded:
    """Implements Runner, for steps of at most so many tokens; but that each row has one at least."""

    def __init__(self, runner: ModelRunner, max_tokens: int) -> None:
        self._runner, self._max_tokens = runner, max_tokens
        self.num_fed = 0

    def execute(self, step: ScheduledStep | None, orders: Orders, /) -> Tensor | None:
        assert step is None or step.num_tokens <= max(self._max_tokens, len(step.decoding))
        self.num_fed += len(step.fed.sources) if step and step.fed else 0
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
    """Of an answer without a grammar; the end of its thinking are the first eight tokens."""
    marker = "<[end]>!"
    budget = ThinkingBudget(
        num_tokens=num_tokens, is_open=is_open, opening="<", closing=marker, closing_ids=tuple(range(len(marker)))
    )

    def bytes_of(token_id: int) -> bytes:
        return marker[token_id].encode() if token_id < len(marker) else b"."

    return ThinkingMask(budget, bytes_of=bytes_of, vocab_size=VOCAB_SIZE)
