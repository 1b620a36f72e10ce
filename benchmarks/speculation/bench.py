"""Speculation benchmark: tokens per second of engines with and without drafts, on prompts whose answers repeat them.

All methods answer the same prompts alternately, some tokens of every row at a time, so that disturbances of the machine
affect all of them; the speedup is the median over the rounds. Only full batches are timed: when an answer ends, the
next one begins, as in a replica with a queue. (Otherwise the row with the fewest accepted drafts would dominate.)
Methods learn step times and acceptance rates from earlier rounds, but do not see the earlier answers, so repeated
similar requests are faster than measured here. Prompts are computed before timing. `--cpu-time`: CPU time of one
thread, for a busy machine.

    python -m benchmarks speculation --json
    python -m benchmarks speculation --method draft,auto --draft-model DIRECTORY
    python -m benchmarks speculation --method eagle --draft-model DIRECTORY --prompts FILE [--every-step]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.speculation.methods_in_turn import (
    BLOCK_SIZE,
    MOST_DRAFTED,
    MethodParts,
    MethodReplica,
    SeededPrompt,
    TimedAnswers,
    answer_in_turn,
    earlier_answers,
)
from core.model.draft_source import DraftSource
from core.types.request import Sampling
from engine.config import EngineConfig


def prompt_texts() -> dict[str, str]:
    """Return the prompt texts by name."""
    found = (
        path for path in files("benchmarks.speculation").joinpath("prompts").iterdir() if path.name.endswith(".txt")
    )
    return {path.name.removesuffix(".txt"): path.read_text() for path in sorted(found, key=lambda path: path.name)}


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
    answers: int | None = None,
    every_step: bool = False,
    draft_tokens: int = MOST_DRAFTED,
    answered: int = 0,
    tell: Callable[[Mapping[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Measure, and return plain JSON values.

    prompts: token ids, per kind as many as the largest batch. answers: number of answers per prompt, with successive
    seeds; None: any number of prompts, all answered once regardless of the batch. methods: including `off`. drafts:
    source for methods that need one. every_step: draft even if it does not pay. draft_tokens: maximum draft length.
    answered: how often each prompt has been answered before in the fleet, with other seeds. tell: called with partial
    results, first without rows, then with the rows of each kind and batch.
    """
    if threads is not None or cpu_time:
        torch.set_num_threads(1 if cpu_time else threads or 1)
    longest = max(len(prompt) for kind in prompts.values() for prompt in kind) + max_tokens
    max_answers = max(max(batches) * answers if answers else len(token_lists) for token_lists in prompts.values())
    num_blocks = len(methods) * max_answers * (-(-longest // BLOCK_SIZE) + 1)
    config = EngineConfig(model_dir=model_dir, block_size=BLOCK_SIZE, num_blocks=num_blocks)
    parts = MethodParts(
        config,
        drafts,
        clock=time.thread_time if cpu_time else time.perf_counter,
        every_step=every_step,
        draft_tokens=draft_tokens,
    )
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=1, stop_token_ids=tuple(stop_token_ids))
    replicas = {method: MethodReplica(method, parts, cpu_time=cpu_time) for method in methods}
    kind_of_time = "cpu" if cpu_time else "wall"
    how: dict[str, Any] = {"model": model_dir.name, "threads": torch.get_num_threads(), "clock": kind_of_time}
    how["temperature"] = temperature
    rows: list[dict[str, Any]] = []
    if tell:
        tell(how | {"rows": rows})
    for kind, token_lists in prompts.items():
        seeds = range(sampling.seed, sampling.seed + (answers or 1))
        known = earlier_answers(
            token_lists, sampling, replicas["off"], range(seeds.stop, seeds.stop + answered), parts.clock
        )
        for batch in batches:
            questions = [
                SeededPrompt(ids, seed) for seed in seeds for ids in (token_lists[:batch] if answers else token_lists)
            ]
            rounds = []
            for number in range(tries):
                first = number % len(methods)
                order = [replicas[method] for method in (*methods[first:], *methods[:first])]
                rounds.append(answer_in_turn(questions, batch, sampling, order, parts.clock, known))
            measured = _rows(kind, batch, rounds)
            if tell:
                tell(how | {"rows": measured})
            rows += measured
    return how | {"rows": rows}


def _rows(kind: str, batch: int, rounds: Seq[Mapping[str, TimedAnswers]]) -> list[dict[str, Any]]:
    plain, last = rounds[0]["off"], rounds[-1]
    return [
        {
            "kind": kind,
            "batch": batch,
            "method": method,
            "tokens": last[method].num_tokens,
            "is_same": all(found[method].tokens == plain.tokens for found in rounds),
            "tokens_per_s": round(median(found[method].tokens_per_s for found in rounds), 1),
            "beside_off": round(median(_beside(found[method], found["off"]) for found in rounds), 3),
            "steps": last[method].num_steps,
            "drafted": last[method].drafted.total(),
            "accepted": last[method].accepted.total(),
            "by_place": _by_place(last[method]),
        }
        # In the requested order.
        for method in rounds[0]
    ]


def _beside(answers: TimedAnswers, plain: TimedAnswers) -> float:
    # All answers ended with their first token.
    return answers.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else 1.0


def _by_place(answers: TimedAnswers) -> list[tuple[int, int]]:
    """Return (drafted, accepted) by position."""
    drafted, accepted = answers.drafted, answers.accepted
    return [(drafted[place], accepted[place]) for place in range(1 + max(drafted, default=-1))]
