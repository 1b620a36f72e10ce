"""Tokens per second of an engine that drafts, beside those of one that does not, on prompts whose answers repeat them.

Every method answers the same prompts in turn, in rounds that each begin with another one, so that what else the
machine does meets all of them; the best of each counts. As in a replica, what steps take and how often guesses are
right has been learnt from what came before; but nothing is known of earlier answers: whoever asks for something like it
again gets it sooner than this says. Prompts are computed before the clock starts. `--cpu-time`: what one thread itself
takes, for a machine that is busy.

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
    num_blocks = max(batches) * (-(-longest // _BLOCK_SIZE) + 1)
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
            found: dict[str, list[_Answers]] = {method: [] for method in methods}
            for number in range(tries):
                first = number % len(methods)
                for method in (*methods[first:], *methods[:first]):
                    groups = [asked[i : i + batch] for i in range(0, len(asked), batch)] if in_turn else [asked[:batch]]
                    answers = [answer(group, sampling, replicas[method], parts.clock, known) for group in groups]
                    for other in answers[1:]:
                        answers[0].add(other)
                    found[method].append(answers[0])
            rows += _rows(kind, batch, found)
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
        self._with_heads: ModelRunner | None = None

    def runner_for(self, method: str) -> ModelRunner:
        """Whoever drafts without heads does not carry them."""
        heads = self._drafts.heads if self._drafts else None
        if heads is None or method not in (heads, "auto"):
            return self.runner
        if self._with_heads is None:
            assert self._drafts
            config = replace(self._config, heads=HeadsPlace(heads, self._drafts.directory))
            self._with_heads = ModelRunner(config)
        return self._with_heads

    def computing(self, method: str, blocks: BlockManager) -> dict[str, Computing]:
        runner = self.runner_for(method)
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
        may_branch, method = not method.endswith(LINEAR), method.removesuffix(LINEAR)
        self.pace = None if parts.every_step else Pace(_CpuMark if cpu_time else HostMark)
        self.corpus = Corpus()
        self.runner = parts.runner_for(method)
        self.blocks = BlockManager(self.runner.pool.num_blocks)
        self.num_rounds = 0
        self.speculation = (
            None
            if method == "off"
            else Speculation.of(
                method,
                max_tokens=parts.draft_tokens,
                vocab_size=self.runner.config.vocab_size,
                computing=parts.computing(method, self.blocks),
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


def _rows(kind: str, batch: int, found: Mapping[str, Seq[_Answers]]) -> list[dict[str, Any]]:
    plain = found["off"]
    return [
        {
            "kind": kind,
            "batch": batch,
            "method": method,
            "tokens": sum(map(len, plain[0].tokens)),
            "is_same": all(one.tokens == plain[0].tokens for one in answers),
            "tokens_per_s": round(sum(map(len, answers[0].tokens)) / _best(answers), 1),
            "beside_off": round(_best(plain) / _best(answers), 3),
            "steps": answers[-1].num_steps,
            "drafted": answers[-1].drafted.total(),
            "accepted": answers[-1].accepted.total(),
            "by_place": _by_place(answers[-1], in_branches=False),
            "branches_by_place": _by_place(answers[-1], in_branches=True),
        }
        for method, answers in found.items()
    ]


def _by_place(answers: _Answers, *, in_branches: bool) -> list[tuple[int, int]]:
    """Drafted, and accepted."""
    drafted, accepted = answers.drafted, answers.accepted
    num_places = 1 + max((place for is_in_branch, place in drafted if is_in_branch == in_branches), default=-1)
    return [(drafted[in_branches, place], accepted[in_branches, place]) for place in range(num_places)]


def _best(answers: Seq[_Answers]) -> float:
    return min(one.seconds for one in answers)


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
    """Of these prompts together. The seconds begin where each has its first token."""
    replica.corpus.forget()
    replica.num_rounds += 1
    runner, pace, speculation = replica.runner, replica.pace, replica.speculation
    before = replica.count()
    limits = SchedulerConfig(max_batch_tokens=512, max_running=_MAX_RUNNING, max_waiting=len(prompts))
    engine = Engine(runner, sample, replica.blocks, limits, block_size=_BLOCK_SIZE, pace=pace, speculation=speculation)
    sequences: list[Sequence] = []
    running: list[Sequence] = []
    for number, tokens in enumerate(prompts):  # each alone
        sequence = _sequence(runner, f"{replica.num_rounds} {number}", tokens, sampling)
        for earlier in known.get(tuple(tokens), ()):
            replica.corpus.add(Answer(Scope.of(sequence.request), tuple(earlier)), is_ours=False)
        engine.add(Prompt(sequence))
        while sequence not in engine.decoding.running and engine.step().did_work:
            pass
        sequences.append(sequence)
        running += [sequence] if sequence in engine.decoding.running else []  # else it has ended already
        engine.pause(sequence)
    for sequence in running:
        engine.resume(sequence)
    num_steps, begin = 0, clock()
    while engine.step().did_work:
        num_steps += 1
    answers = _Answers(clock() - begin, num_steps, [one.tokens[one.request.num_prompt_tokens :] for one in sequences])
    answers.drafted, answers.accepted = (now - then for now, then in zip(replica.count(), before, strict=True))
    return answers


def _sequence(runner: ModelRunner, name: str, tokens: Seq[int], sampling: Sampling) -> Sequence:
    """name: another one in each round, so that nothing of earlier ones is found."""
    request = SequenceRequest(
        id=name, token_ids=tuple(tokens), num_prompt_tokens=len(tokens), sampling=sampling, salt=name
    )
    layout, limit = runner.layout, len(tokens) + sampling.max_tokens + 1
    return Sequence(request, 0, model=layout.model, block_size=layout.block_size, max_context=limit)
