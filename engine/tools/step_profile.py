"""Step times of a model on this machine: alone, and with other replicas stepping at the same time."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from core.process.child_process import ChildProcess
from core.types.step_timing import StepTiming, pairs
from engine.timing.step_time_model import StepTimeModel

# In tokens.
_PROMPTS = (32, 128, 512, 1024)
_BATCHES, _CONTEXTS = (1, 4), (64, 512)
_BESIDE = {"prefill": {"num_tokens": 256}, "decode": {"batch": 2, "context": 128}}
_ANSWER_S = 300.0


def profile_steps(
    model_dir: Path,
    *,
    dtype: str,
    weights: str,
    pool_dtype: str,
    threads: int,
    num_replicas: int,
    seconds: float,
) -> dict[str, Any]:
    """Return {"weight_bytes": bytes, "prefill": StepTiming, "decode": StepTiming, "slowdown": [...]}.

    slowdown[k - 1] is the relative step time while k replicas of `threads` threads each step at the same time, for k up
    to num_replicas. seconds: duration of each measurement. Raises ReplicaLost.
    """
    most_tokens = max(max(_PROMPTS), max(_BATCHES) * (max(_CONTEXTS) + 96)) + 1024
    options = {
        "model_dir": str(model_dir),
        "dtype": dtype,
        "weights": weights,
        "pool_dtype": pool_dtype,
        "threads": threads,
        "most_tokens": most_tokens,
    }
    with ExitStack() as stack:
        steppers = []
        for _ in range(num_replicas):
            steppers.append(ChildProcess("engine.tools.stepper", json.dumps(options), answer_s=_ANSWER_S))
            stack.callback(steppers[-1].close)
            steppers[-1].tell("ready")
        for stepper in steppers:
            stepper.answer()
        return {
            "weight_bytes": steppers[0].ask("memory")["weights"],
            "prefill": _prefill_timing(steppers[0], seconds),
            "decode": _decode_timing(steppers[0], seconds),
            "slowdown": _slowdown(steppers, seconds * 2),
        }


def _prefill_timing(stepper: ChildProcess, seconds: float) -> StepTiming:
    learned = StepTimeModel(min_steps=1)
    for num_tokens in _PROMPTS:
        step_s = _mean_s([stepper], "prefill", num_tokens=num_tokens, seconds=seconds)
        learned.add(num_tokens=num_tokens, num_pairs=pairs(num_tokens, after=0), num_context=0, seconds=step_s)
    return _settled(learned)


def _decode_timing(stepper: ChildProcess, seconds: float) -> StepTiming:
    learned = StepTimeModel(min_steps=1)
    for context in _CONTEXTS:
        for batch in _BATCHES:
            step_s = _mean_s([stepper], "decode", batch=batch, context=context, seconds=seconds)
            learned.add(num_tokens=batch, num_pairs=0, num_context=batch * context, seconds=step_s)
    return _settled(learned)


def _slowdown(steppers: Seq[ChildProcess], seconds: float) -> list[float]:
    """Return the slowdown for each number of concurrent replicas, averaged over prefill and decode."""
    found = [
        [_mean_s(steppers[:count], order, seconds=seconds, **of) for order, of in _BESIDE.items()]
        for count in range(1, len(steppers) + 1)
    ]
    return [sum(s / alone for s, alone in zip(beside, found[0], strict=True)) / len(_BESIDE) for beside in found]


def _mean_s(steppers: Seq[ChildProcess], order: str, **arguments: Any) -> float:
    """Return the mean step time over replicas that run the same steps concurrently."""
    for stepper in steppers:
        stepper.tell(order, **arguments)
    return sum(float(stepper.answer()) for stepper in steppers) / len(steppers)


def _settled(learned: StepTimeModel) -> StepTiming:
    timing = learned.timing
    assert timing
    return timing
