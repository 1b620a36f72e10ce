"""Tokens per second of an engine that drafts, beside those of one that does not, on prompts whose answers repeat them.

All methods answer the same prompts at a time, each in turn some tokens of every row, so that what else the machine does
meets all of them; of how much quicker one is than none, the median of the rounds counts. As in a replica, what steps
take and how often guesses are right has been learnt from what came before; but nothing is known of earlier answers:
whoever asks for something like it again gets it sooner than this says. Prompts are computed before the clock starts.
`--cpu-time`: what one thread itself takes, for a machine that is busy.

    cluster bench speculation --json
    cluster bench speculation --method draft,auto --draft-model DIRECTORY
    cluster bench speculation --method eagle --draft-model DIRECTORY --prompts DIRECTORY [--every-step]
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cluster.model.draft_heads import HeadsPlace
from cluster.model.draft_source import DraftSource
from cluster.words.request import BRANCHES, Sampling, SequenceRequest
from engine.config import EngineConfig
from engine.draft_models.draft_model import DraftModel
from engine.draft_models.head_proposer import HeadProposer
from engine.draft_models.own_layers import OwnLayers
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.pace import HostMark, Pace
from engine.prompts import Prompt
from engine.runner import ModelRunner
from engine.sampler import sample
from engine.sequence import Sequence
from engine.speculation.corpus import Answer, Corpus, Scope
from engine.speculation.proposer import Computing
from engine.speculation.speculation import Speculation

_BLOCK_SIZE = 16
_MAX_RUNNING = 64  # as in a decode replica, if the operator says nothing
_MAX_DRAFT = 16
_TURN = 16  # tokens of each row
LINEAR = "-linear"


def prompt_texts() -> dict[str, str]:
    """What is asked, by name."""
    found = (path for path in files("engine.tools").joinpath("prompts").iterdir() if path.name.endswith(".txt"))
    return {path.name.removesuffix(".txt"): path.read_text() for path in sorted(found, key=lambda path: path.name)}


Places = Counter[tuple[bool, int]]  # tokens: whether in a branch, and where in their draft


@dataclass
class _Answers:
    seconds: float
    num_steps: int
    tokens: list[list[int]]
    drafted: Places = field(default_factory=Counter)
    accepted: Places = field(default_factory=Counter)

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds

    def add(self, other: _Answers) -> None:
        """Those of other prompts, which came after."""
        self.seconds += other.seconds
        self.num_steps += other.num_steps
        self.tokens += other.tokens
        self.drafted += other.drafted
        self.accepted += other.accepted


def bench_speculation(
    model_dir: Path,
    prompts: Mapping[str, Seq[Seq[int]]],
    *,
    batches: Seq[int],
    methods: Seq[str],
    drafts: DraftSource | None = None,
    temperature: float,
    max_tokens: int,
    stop_token_ids: Seq[int],
    tries: int,
    threads: int | None,
    cpu_time: bool,
    in_turn: bool = False,
    every_step: bool = False,
    draft_tokens: int = _MAX_DRAFT,
    answered: int = 0,
) -> dict[str, Any]:
    """Measure; returns plain JSON values.

    prompts: of each kind as many as the largest batch, as token ids; in_turn: any number, of which each batch takes its
    share until all are answered. methods: with `off`; of one that ends with LINEAR drafts do not branch. drafts: what
    those draft by that need it. every_step: whatever is guessed is drafted, worth it or not. draft_tokens: of a draft,
    at most. answered: so often each prompt has been answered before, with other seeds, by some replica of the fleet.
    """
    if threads is not None or cpu_time:
        torch.set_num_threads(1 if cpu_time else threads or 1)
    longest = max(len(prompt) for kind in prompts.values() for prompt in kind) + max_tokens
    num_blocks = len(methods) * max(batches) * (-(-longest // _BLOCK_SIZE) + 1)
    config = EngineConfig(model_dir=model_dir, block_size=_BLOCK_SIZE, num_blocks=num_blocks)
    parts = MethodParts(
        config,
        drafts,
        clock=time.thread_time if cpu_time else time.perf_counter,
        every_step=every_step,
        draft_tokens=draft_tokens,
    )
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=1, stop_token_ids=tuple(stop_token_ids))
    replicas = {method: MethodReplica(method, parts, cpu_time=cpu_time) for method in methods}
    rows = []
    for kind, asked in prompts.items():
        known = _earlier(asked, sampling, replicas["off"], answered, parts.clock)
        for batch in batches:
            groups = [asked[i : i + batch] for i in range(0, len(asked), batch)] if in_turn else [asked[:batch]]
            rounds = []
            for number in range(tries):
                first = number % len(methods)
                order = [replicas[method] for method in (*methods[first:], *methods[:first])]
                found = [_in_turn(group, sampling, order, parts.clock, known) for group in groups]
                for others in found[1:]:
                    for method, more in others.items():
                        found[0][method].add(more)
                rounds.append(found[0])
            rows += _rows(kind, batch, rounds)
    kind_of_time = "cpu" if cpu_time else "wall"
    how = {"model": model_dir.name, "threads": torch.get_num_threads(), "clock": kind_of_time}
    return how | {"temperature": temperature, "rows": rows}


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

    def computing(self, method: str, runner: ModelRunner, blocks: BlockManager) -> dict[str, Computing]:
        if method == "self":
            return {"self": OwnLayers(runner, blocks, before_writing=lambda: None)}
        if self._drafts is None or method not in (self._drafts.kind, "auto"):
            return {}
        if self._drafts.heads:
            return {self._drafts.heads: HeadProposer(runner, by_place=self._drafts.heads == "medusa")}
        own = replace(self._config, model_dir=self._drafts.directory, num_blocks=None)
        num_tokens = blocks.num_blocks * _BLOCK_SIZE
        return {"draft": DraftModel.open(own, vocab_size=runner.config.vocab_size, num_tokens=num_tokens)}


class MethodReplica:
    """What a method has learnt."""

    def __init__(self, method: str, parts: MethodParts, *, cpu_time: bool) -> None:
        self.method = method
        may_branch, method = not method.endswith(LINEAR), method.removesuffix(LINEAR)
        self.pace = None if parts.every_step else Pace(_CpuMark if cpu_time else HostMark)
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
                computing=parts.computing(method, self.runner, self.blocks),
                corpus=self.corpus,
                may_branch=may_branch,
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


class _CpuMark:
    """Implements StepMark by the time that this thread has had."""

    is_past = True

    def __init__(self) -> None:
        self._at = time.thread_time()

    def seconds_since(self, earlier: _CpuMark) -> float:
        return self._at - earlier._at


def _rows(kind: str, batch: int, rounds: Seq[Mapping[str, _Answers]]) -> list[dict[str, Any]]:
    plain, last = rounds[0]["off"], rounds[-1]
    return [
        {
            "kind": kind,
            "batch": batch,
            "method": method,
            "tokens": sum(map(len, plain.tokens)),
            "is_same": all(found[method].tokens == plain.tokens for found in rounds),
            "tokens_per_s": round(max(found[method].tokens_per_s for found in rounds), 1),
            "beside_off": round(median(found["off"].seconds / found[method].seconds for found in rounds), 3),
            "steps": last[method].num_steps,
            "drafted": last[method].drafted.total(),
            "accepted": last[method].accepted.total(),
            "by_place": _by_place(last[method], in_branches=False),
            "branches_by_place": _by_place(last[method], in_branches=True),
        }
        for method in rounds[0]  # in the order that was asked for
    ]


def _by_place(answers: _Answers, *, in_branches: bool) -> list[tuple[int, int]]:
    """Drafted, and accepted."""
    drafted, accepted = answers.drafted, answers.accepted
    num_places = 1 + max((place for is_in_branch, place in drafted if is_in_branch == in_branches), default=-1)
    return [(drafted[in_branches, place], accepted[in_branches, place]) for place in range(num_places)]


Known = Mapping[tuple[int, ...], Seq[Seq[int]]]  # earlier answers, by prompt


def _earlier(
    prompts: Seq[Seq[int]], sampling: Sampling, replica: MethodReplica, count: int, clock: Callable[[], float]
) -> Known:
    found: dict[tuple[int, ...], list[list[int]]] = {tuple(prompt): [] for prompt in prompts}
    for prompt in prompts:
        for number in range(count):
            found[tuple(prompt)] += answer([prompt], replace(sampling, seed=2 + number), replica, clock, {}).tokens
    return found


def answer(
    prompts: Seq[Seq[int]], sampling: Sampling, replica: MethodReplica, clock: Callable[[], float], known: Known
) -> _Answers:
    """Of these prompts together."""
    return _in_turn(prompts, sampling, [replica], clock, known)[replica.method]


def _in_turn(
    prompts: Seq[Seq[int]],
    sampling: Sampling,
    replicas: Seq[MethodReplica],
    clock: Callable[[], float],
    known: Known,
) -> dict[str, _Answers]:
    """The same of each replica, by its method."""
    answering = {replica.method: _Answering(prompts, sampling, replica, clock, known) for replica in replicas}
    going_on = list(answering.values())
    while going_on:
        going_on = [one for one in going_on if one.go_on()]
    return {method: one.answers() for method, one in answering.items()}


class _Answering:
    """Prompts that a replica answers together, some tokens at a time. Seconds count where each has its first one."""

    def __init__(
        self,
        prompts: Seq[Seq[int]],
        sampling: Sampling,
        replica: MethodReplica,
        clock: Callable[[], float],
        known: Known,
    ) -> None:
        replica.corpus.forget()
        replica.num_rounds += 1
        self._replica = replica
        self._clock = clock
        self._before = replica.count()
        self._seconds, self._num_steps = 0.0, 0
        limits = SchedulerConfig(max_batch_tokens=512, max_running=_MAX_RUNNING, max_waiting=len(prompts))
        self._engine = Engine(
            *(replica.runner, sample, replica.blocks, limits),
            block_size=_BLOCK_SIZE,
            pace=replica.pace,
            speculation=replica.speculation,
        )
        self._sequences: list[Sequence] = []
        running = [one for number, tokens in enumerate(prompts) if (one := self._add(number, tokens, sampling, known))]
        for sequence in running:
            self._engine.resume(sequence)

    def go_on(self) -> bool:
        """A turn; False: all have ended."""
        enough = self._num_tokens() + _TURN * len(self._sequences)
        if self._replica.pace:
            self._replica.pace.rest()  # it was not this one's turn
        begin, did_work = self._clock(), True
        while did_work and self._num_tokens() < enough:
            did_work = self._engine.step().did_work
            self._num_steps += did_work
        self._seconds += self._clock() - begin
        return did_work

    def answers(self) -> _Answers:
        tokens = [one.tokens[one.request.num_prompt_tokens :] for one in self._sequences]
        found = _Answers(self._seconds, self._num_steps, tokens)
        found.drafted, found.accepted = (
            now - then for now, then in zip(self._replica.count(), self._before, strict=True)
        )
        return found

    def _add(self, number: int, tokens: Seq[int], sampling: Sampling, known: Known) -> Sequence | None:
        """Compute a prompt alone; it waits then. None: its answer is over already."""
        replica, engine = self._replica, self._engine
        sequence = _sequence(replica.runner, f"{replica.method} {replica.num_rounds} {number}", tokens, sampling)
        for earlier in known.get(tuple(tokens), ()):
            replica.corpus.add(Answer(Scope.of(sequence.request), tuple(earlier)), is_ours=False)
        engine.add(Prompt(sequence))
        while sequence not in engine.decoding.running and engine.step().did_work:
            pass
        self._sequences.append(sequence)
        is_running = sequence in engine.decoding.running
        engine.pause(sequence)
        return sequence if is_running else None

    def _num_tokens(self) -> int:
        return sum(len(sequence.tokens) for sequence in self._sequences)


def _sequence(runner: ModelRunner, name: str, tokens: Seq[int], sampling: Sampling) -> Sequence:
    """name: another one for each method and round, so that nothing of others is found."""
    request = SequenceRequest(
        id=name, token_ids=tuple(tokens), num_prompt_tokens=len(tokens), sampling=sampling, salt=name
    )
    layout, limit = runner.layout, len(tokens) + sampling.max_tokens + 1
    return Sequence(request, 0, model=layout.model, block_size=layout.block_size, max_context=limit)
