"""Engines with one drafting method each that answer the same prompts alternately, some tokens of every row at a time.

When an answer ends, the next one begins; when none is left, timing stops and the rest is answered untimed. So the batch
is full while it is timed, and the order in which answers end does not matter. Prompts and first tokens are computed
before; their sequences wait with their KV.
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
from core.types.request import Sampling, SequenceRequest
from engine.config import EngineConfig
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.runner.runner import ModelRunner
from engine.sampling.sampler import sample
from engine.scheduler.prompts import Prompt
from engine.scheduler.sequence import Sequence
from engine.spec_decode.draft_models.draft_model import DraftModel, HeadProposer, OwnLayers
from engine.spec_decode.proposer import ModelProposer
from engine.spec_decode.speculation import Speculation
from engine.spec_decode.suffix import Corpus, Scope
from engine.timing.pace import HostEvent, Pace

BLOCK_SIZE = 16
MOST_DRAFTED = 16  # tokens per row
# Default of a decode replica.
_MAX_RUNNING = 64
_TURN = 16  # tokens per row

Places = Counter[int]  # token counts by position in the draft
Known = Mapping[tuple[int, ...], Seq[Seq[int]]]  # earlier answers, by prompt


class SeededPrompt(NamedTuple):
    """Prompt, and seed of its answer."""

    token_ids: Seq[int]
    seed: int


@dataclass
class TimedAnswers:
    """Answers of one replica, with counters of the time while its batch was full."""

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
    """Shared parts of all methods."""

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
        self.blocks = BlockManager(
            self.runner.pool.num_blocks, num_states=self.runner.pool.num_states
        )  # shared by all methods on this runner

    def with_runner(self, method: str) -> tuple[ModelRunner, BlockManager]:
        """Return a runner for the method. Only methods that use the draft heads load them."""
        heads = self._drafts.heads if self._drafts else None
        if heads is None or method not in (heads, "auto"):
            return self.runner, self.blocks
        assert self._drafts
        runner = ModelRunner(replace(self._config, heads=HeadsPlace(heads, self._drafts.directory)))
        return runner, BlockManager(runner.pool.num_blocks, num_states=runner.pool.num_states)

    def models(self, method: str, runner: ModelRunner, blocks: BlockManager) -> dict[str, ModelProposer]:
        if method == "self":
            return {"self": OwnLayers(runner, blocks, before_writing=lambda: None)}
        if self._drafts is None or method not in (self._drafts.kind, "auto"):
            return {}
        if self._drafts.heads:
            return {self._drafts.heads: HeadProposer(runner)}
        own = replace(self._config, model_dir=self._drafts.directory, num_blocks=None)
        num_tokens = blocks.num_blocks * BLOCK_SIZE
        return {"draft": DraftModel.open(own, vocab_size=runner.config.vocab_size, num_tokens=num_tokens)}


class MethodReplica:
    """Engine state of one method, including what it has learned."""

    def __init__(self, method: str, parts: MethodParts, *, cpu_time: bool) -> None:
        self.method = method
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
                backs_off=not parts.every_step,
                clock=parts.clock,
            )
        )

    def count(self) -> tuple[Places, Places]:
        """Return tokens drafted and accepted so far."""
        drafted, accepted = Places(), Places()
        for counts in self.speculation.counts.values() if self.speculation else ():
            drafted.update(counts.drafted)
            accepted.update(counts.accepted)
        return drafted, accepted


class _CpuEvent:
    """StepMark in CPU time of this thread."""

    is_past = True

    def __init__(self) -> None:
        self._at = time.thread_time()

    def seconds_since(self, earlier: _CpuEvent) -> float:
        return self._at - earlier._at


def earlier_answers(
    prompts: Seq[Seq[int]], sampling: Sampling, replica: MethodReplica, seeds: Seq[int], clock: Callable[[], float]
) -> Known:
    """Return the answers with each of these seeds."""
    found: dict[tuple[int, ...], list[list[int]]] = {tuple(prompt): [] for prompt in prompts}
    for prompt in prompts:
        for seed in seeds:
            found[tuple(prompt)] += answer([SeededPrompt(prompt, seed)], 1, sampling, replica, clock, {}).tokens
    return found


def answer(
    prompts_to_answer: Seq[SeededPrompt],
    batch: int,
    sampling: Sampling,
    replica: MethodReplica,
    clock: Callable[[], float],
    known: Known,
) -> TimedAnswers:
    """Answer prompts in batches of this size."""
    return answer_in_turn(prompts_to_answer, batch, sampling, [replica], clock, known)[replica.method]


def answer_in_turn(
    prompts_to_answer: Seq[SeededPrompt],
    batch: int,
    sampling: Sampling,
    replicas: Seq[MethodReplica],
    clock: Callable[[], float],
    known: Known,
) -> dict[str, TimedAnswers]:
    """Answer with each replica. Returns answers by method. sampling: without seed. known: answers known in advance."""
    answering = {
        replica.method: _AnswerRun(prompts_to_answer, batch, sampling, replica, clock, known) for replica in replicas
    }
    active = list(answering.values())
    while active:
        active = [one for one in active if one.run_turn()]
    return {method: one.answers() for method, one in answering.items()}


class _AnswerRun:
    """Prompts being answered by one replica, in batches."""

    def __init__(
        self,
        prompts_to_answer: Seq[SeededPrompt],
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
        limits = SchedulerConfig(max_batch_tokens=512, max_running=_MAX_RUNNING, max_waiting=len(prompts_to_answer))
        self._engine = Engine(
            *(replica.runner, sample, replica.blocks, limits),
            block_size=BLOCK_SIZE,
            pace=replica.pace,
            speculation=replica.speculation,
        )
        self._sequences: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        for number, one in enumerate(prompts_to_answer):
            self._add(number, one.token_ids, replace(sampling, seed=one.seed), known)
        self._batch = min(batch, len(self._waiting))
        self._answers = TimedAnswers([])
        self._before = self._num_tokens(), *replica.count()

    def run_turn(self) -> bool:
        """Run one turn. Returns False once the batch is no longer full."""
        enough = self._num_tokens() + _TURN * self._batch
        if self._replica.pace:
            # Other methods ran in the meantime.
            self._replica.pace.rest()
        begin = self._clock()
        while (is_full := self._fill()) and self._num_tokens() < enough:
            self._engine.step()
            self._answers.num_steps += 1
        self._answers.seconds += self._clock() - begin
        return is_full

    def answers(self) -> TimedAnswers:
        """Answer the rest untimed, and return all answers."""
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
        """Start answers up to the batch size. Returns whether the batch is full."""
        running = self._engine.decoding.running
        while self._waiting and len(running) < self._batch:
            self._engine.resume(self._waiting.popleft())
        return 0 < len(running) == self._batch

    def _add(self, number: int, tokens: Seq[int], sampling: Sampling, known: Known) -> None:
        """Compute one prompt. Its sequence waits unless it has ended already."""
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
    """Create a sequence. name: unique per method and round, so that no other KV is reused."""
    request = SequenceRequest(
        id=name, token_ids=tuple(tokens), num_prompt_tokens=len(tokens), sampling=sampling, salt=name
    )
    layout, limit = runner.layout, len(tokens) + sampling.max_tokens + 1
    return Sequence(request, 0, model=layout.model, block_size=layout.block_size, max_context=limit)
