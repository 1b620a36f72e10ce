"""Engines that draft by one method each, and answer the same prompts in turn: some tokens of every row at a time.

Where an answer ends, the next one begins; when none is left to begin, the clock stops, and the rest is answered without
it. So a batch is as large as it is said to be as long as that is measured, and it is no matter which of its answers
ends last. Prompts, with the first token of each answer, are computed before; their sequences wait with their KV.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from core.model.draft_heads import HeadsPlace
from core.model.draft_source import DraftSource
from core.types.request import BRANCHES, Sampling, SequenceRequest
from engine.config import EngineConfig
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.runner.runner import ModelRunner
from engine.sampling.sampler import sample
from engine.scheduler.prompts import Prompt
from engine.scheduler.sequence import Sequence
from engine.spec_decode.draft_models.draft_model import DraftModel, OwnLayers
from engine.spec_decode.draft_models.head_proposer import HeadProposer
from engine.spec_decode.proposer import ModelProposer
from engine.spec_decode.speculation import Speculation
from engine.spec_decode.suffix import Corpus, Scope
from engine.timing.pace import HostEvent, Pace

BLOCK_SIZE = 16
MOST_DRAFTED = 16  # tokens of a row
LINEAR = "-linear"
_MAX_RUNNING = 64  # as in a decode replica, if the operator says nothing
_TURN = 16  # tokens of each row

Places = Counter[tuple[bool, int]]  # tokens: whether in a branch, and where in their draft
Known = Mapping[tuple[int, ...], Seq[Seq[int]]]  # earlier answers, by prompt


class AskedPrompt(NamedTuple):
    """A prompt, and the seed of its answer."""

    token_ids: Seq[int]
    seed: int


@dataclass
class TimedAnswers:
    """Of one replica, and what it did while its batch was full."""

    tokens: list[list[int]]
    seconds: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    drafted: Places = field(default_factory=Counter)
    accepted: Places = field(default_factory=Counter)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0


class MethodParts:
    """What methods are made of."""

    def __init__(
        self,
        config: EngineConfig,
        drafts: DraftSource | None,
        *,
        clock: Callable[[], float],
        every_step: bool,
        draft_tokens: int,
    ) -> None:
        self.runner = ModelRunner(config)
        self.clock = clock
        self.every_step = every_step
        self.draft_tokens = draft_tokens
        self._config = config
        self._drafts = drafts
        self.blocks = BlockManager(self.runner.pool.num_blocks)  # of all whose runner that is

    def with_runner(self, method: str) -> tuple[ModelRunner, BlockManager]:
        """Whoever drafts without heads does not carry them; and heads are one method's."""
        heads = self._drafts.heads if self._drafts else None
        if heads is None or method not in (heads, "auto"):
            return self.runner, self.blocks
        assert self._drafts
        runner = ModelRunner(replace(self._config, heads=HeadsPlace(heads, self._drafts.directory)))
        return runner, BlockManager(runner.pool.num_blocks)

    def models(self, method: str, runner: ModelRunner, blocks: BlockManager) -> dict[str, ModelProposer]:
        if method == "self":
            return {"self": OwnLayers(runner, blocks, before_writing=lambda: None)}
        if self._drafts is None or method not in (self._drafts.kind, "auto"):
            return {}
        if self._drafts.heads:
            return {self._drafts.heads: HeadProposer(runner, by_place=self._drafts.heads == "medusa")}
        own = replace(self._config, model_dir=self._drafts.directory, num_blocks=None)
        num_tokens = blocks.num_blocks * BLOCK_SIZE
        return {"draft": DraftModel.open(own, vocab_size=runner.config.vocab_size, num_tokens=num_tokens)}


class MethodReplica:
    """What a method has learnt."""

    def __init__(self, method: str, parts: MethodParts, *, cpu_time: bool) -> None:
        self.method = method
        may_branch, method = not method.endswith(LINEAR), method.removesuffix(LINEAR)
        self.pace = None if parts.every_step else Pace(_CpuEvent if cpu_time else HostEvent)
        self.corpus = Corpus()
        self.runner, self.blocks = parts.with_runner(method)
        self.num_rounds = 0
        self.speculation = (
            None
            if method == "off"
            else Speculation.of(
                method,
                max_tokens=parts.draft_tokens,
                vocab_size=self.runner.config.vocab_size,
                models=parts.models(method, self.runner, self.blocks),
                corpus=self.corpus,
                may_branch=may_branch,
                backs_off=not parts.every_step,
                clock=parts.clock,
            )
        )

    def count(self) -> tuple[Places, Places]:
        """Tokens drafted, and accepted, so far."""
        drafted, accepted = Places(), Places()
        for method, counts in self.speculation.counts.items() if self.speculation else ():
            for found, by_place in ((drafted, counts.drafted), (accepted, counts.accepted)):
                for place, count in by_place.items():
                    found[method == BRANCHES, place] += count
        return drafted, accepted


class _CpuEvent:
    """Implements StepMark by the time that this thread has had."""

    is_past = True

    def __init__(self) -> None:
        self._at = time.thread_time()

    def seconds_since(self, earlier: _CpuEvent) -> float:
        return self._at - earlier._at


def earlier_answers(
    prompts: Seq[Seq[int]], sampling: Sampling, replica: MethodReplica, seeds: Seq[int], clock: Callable[[], float]
) -> Known:
    """With each of these seeds."""
    found: dict[tuple[int, ...], list[list[int]]] = {tuple(prompt): [] for prompt in prompts}
    for prompt in prompts:
        for seed in seeds:
            found[tuple(prompt)] += answer([AskedPrompt(prompt, seed)], 1, sampling, replica, clock, {}).tokens
    return found


def answer(
    asked: Seq[AskedPrompt],
    batch: int,
    sampling: Sampling,
    replica: MethodReplica,
    clock: Callable[[], float],
    known: Known,
) -> TimedAnswers:
    """So many at a time."""
    return answer_in_turn(asked, batch, sampling, [replica], clock, known)[replica.method]


def answer_in_turn(
    asked: Seq[AskedPrompt],
    batch: int,
    sampling: Sampling,
    replicas: Seq[MethodReplica],
    clock: Callable[[], float],
    known: Known,
) -> dict[str, TimedAnswers]:
    """The same of each replica, by its method. sampling: but for the seed. known: told to each beforehand."""
    answering = {replica.method: _Answering(asked, batch, sampling, replica, clock, known) for replica in replicas}
    going_on = list(answering.values())
    while going_on:
        going_on = [one for one in going_on if one.go_on()]
    return {method: one.answers() for method, one in answering.items()}


class _Answering:
    """Prompts that a replica answers, so many at a time."""

    def __init__(
        self,
        asked: Seq[AskedPrompt],
        batch: int,
        sampling: Sampling,
        replica: MethodReplica,
        clock: Callable[[], float],
        known: Known,
    ) -> None:
        replica.corpus.clear()
        replica.num_rounds += 1
        self._replica = replica
        self._clock = clock
        limits = SchedulerConfig(max_batch_tokens=512, max_running=_MAX_RUNNING, max_waiting=len(asked))
        self._engine = Engine(
            *(replica.runner, sample, replica.blocks, limits),
            block_size=BLOCK_SIZE,
            pace=replica.pace,
            speculation=replica.speculation,
        )
        self._sequences: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        for number, one in enumerate(asked):
            self._add(number, one.token_ids, replace(sampling, seed=one.seed), known)
        self._batch = min(batch, len(self._waiting))
        self._answers = TimedAnswers([])
        self._before = self._num_tokens(), *replica.count()

    def go_on(self) -> bool:
        """A turn; False: all have ended."""
        enough = self._num_tokens() + _TURN * self._batch
        if self._replica.pace:
            self._replica.pace.rest()  # it was not this one's turn
        begin = self._clock()
        while (is_full := self._fill()) and self._num_tokens() < enough:
            self._engine.step()
            self._answers.num_steps += 1
        self._answers.seconds += self._clock() - begin
        return is_full

    def answers(self) -> TimedAnswers:
        """Behind the last turn."""
        found, (num_tokens, *before) = self._answers, self._before
        found.num_tokens = self._num_tokens() - num_tokens
        found.drafted, found.accepted = (now - then for now, then in zip(self._replica.count(), before, strict=True))
        if self._replica.pace:
            self._replica.pace.rest()
        while self._engine.step().did_work:
            pass
        found.tokens = [one.tokens[one.request.num_prompt_tokens :] for one in self._sequences]
        return found

    def _fill(self) -> bool:
        """Begin as many answers as there is room for; False: there are none any more."""
        running = self._engine.decoding.running
        while self._waiting and len(running) < self._batch:
            self._engine.resume(self._waiting.popleft())
        return 0 < len(running) == self._batch

    def _add(self, number: int, tokens: Seq[int], sampling: Sampling, known: Known) -> None:
        """Compute a prompt alone; it waits then, if its answer is not over already."""
        replica, engine = self._replica, self._engine
        sequence = _sequence(replica.runner, f"{replica.method} {replica.num_rounds} {number}", tokens, sampling)
        for earlier in known.get(tuple(tokens), ()):
            replica.corpus.add(Scope.of(sequence.request), earlier)
        engine.add(Prompt(sequence))
        while sequence not in engine.decoding.running and engine.step().did_work:
            pass
        self._sequences.append(sequence)
        if sequence in engine.decoding.running:
            self._waiting.append(sequence)
        engine.pause(sequence)

    def _num_tokens(self) -> int:
        return sum(len(sequence.tokens) for sequence in self._sequences)


def _sequence(runner: ModelRunner, name: str, tokens: Seq[int], sampling: Sampling) -> Sequence:
    """name: another one for each method and round, so that nothing of others is found."""
    request = SequenceRequest(
        id=name, token_ids=tuple(tokens), num_prompt_tokens=len(tokens), sampling=sampling, salt=name
    )
    layout, limit = runner.layout, len(tokens) + sampling.max_tokens + 1
    return Sequence(request, 0, model=layout.model, block_size=layout.block_size, max_context=limit)
