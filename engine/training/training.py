"""From a model to heads that draft for it: answers, what the model computes of them, and then pass after pass.

1. the model answers, part by part, until there are tokens enough
2. what it computes of them goes to disk
3. the heads are trained; after every pass they are measured on the answers held out, and published
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from core.types.errors import SpecError
from engine.config import EngineConfig
from engine.runner.runner import ModelRunner
from engine.training.answers import AnswerParts, Asker, OwnAnswer
from engine.training.batches import batch_of, batches
from engine.training.eagle import EagleLearner
from engine.training.held_out import acceptance
from engine.training.hidden_states_file import CachedAnswer, bytes_per_token, cached
from engine.training.learner import Learner
from engine.training.medusa import MedusaLearner
from engine.training.run import Kind, Run
from engine.training.teacher import Teacher
from engine.training.vocabulary import DraftVocabulary

_STEP_TOKENS = 256  # of a step: many small ones teach more in the same time than few large ones
_RATE = 2e-3
_LAST_RATE = 0.05  # of the greatest
_WARM_UP = 30  # steps
_MAX_NORM = 1.0  # of gradients
_SAVE_EVERY_S = 60.0

_LEARNERS: dict[Kind, type[EagleLearner] | type[MedusaLearner]] = {"eagle3": EagleLearner, "medusa": MedusaLearner}


class TrainingProgress(Protocol):
    """Told how far a run has come."""

    def begin(self, what: str, total: int, done: int) -> None:
        """Something is under way, of which so much was done before."""
        ...

    def advance(self, count: int, note: str = "") -> None: ...

    def say(self, line: str) -> None: ...


def train(
    run: Run,
    model_dir: Path,
    kind: Kind,
    asker: Asker,
    *,
    seed: int,
    tokens: int,
    max_answer: int,
    passes: int,
    progress: TrainingProgress,
    save_every_s: float = _SAVE_EVERY_S,
    step_tokens: int = _STEP_TOKENS,
    rate: float = _RATE,
) -> dict[str, Any]:
    """Carry a run out, or what is left of it; returns its report. tokens: of answers, all in all; max_answer: of one.

    Raises SpecError for a model or data that cannot be trained with, or too little room on the disk.
    """
    if run.is_done:
        return run.report()
    parts = _answers(run, model_dir, asker, seed=seed, tokens=tokens, max_answer=max_answer, progress=progress)
    teacher = cache(lambda: Teacher(model_dir))
    texts = _features(run, parts, teacher, progress)
    held_out = [text for text in texts if text.answer.is_held_out]
    trained = [text for text in texts if not text.answer.is_held_out]
    if not trained or not held_out:
        raise SpecError(f"--data: {len(texts)} answers are too few to train on some and to measure on others")
    vocabulary = DraftVocabulary.of((text.answer for text in trained), teacher().config.vocab_size)
    progress.say(f"{len(vocabulary.ids_V)} tokens are {vocabulary.share:.1%} of all that was said")
    learner = _LEARNERS[kind](teacher(), vocabulary, seed=seed)
    plan = [batches(trained, seed=f"{seed} {number}", max_tokens=step_tokens) for number in range(passes)]
    _Lessons(run, learner, plan, held_out, rate=rate, dtype=teacher().dtype).give(progress, save_every_s=save_every_s)
    run.note(run.report() | {"is_done": True})
    run.forget_features()
    return run.report()


def _answers(
    run: Run, model_dir: Path, asker: Asker, *, seed: int, tokens: int, max_answer: int, progress: TrainingProgress
) -> list[list[OwnAnswer]]:
    answers = AnswerParts(run.training, asker, seed=seed, max_tokens=max_answer)
    parts = list(answers.existing())
    count = sum(map(_num_answer, parts))
    progress.begin("answers", tokens, min(count, tokens))
    runner = cache(lambda: ModelRunner(EngineConfig(model_dir=model_dir)))
    while count < tokens and (part := answers.make(len(parts), runner())):
        parts.append(part)
        made = _num_answer(part)
        progress.advance(min(made, tokens - count), f"{sum(map(len, parts))} answers")
        count += made
    return parts


def _num_answer(part: Sequence[OwnAnswer]) -> int:
    return sum(answer.num_answer for answer in part)


def _features(
    run: Run, parts: Sequence[Sequence[OwnAnswer]], teacher: Callable[[], Teacher], progress: TrainingProgress
) -> list[CachedAnswer]:
    paths = [run.training / f"features-{number:05}.safetensors" for number in range(len(parts))]
    counts = [sum(len(answer.tokens) for answer in part) for part in parts]
    missing = [count for path, count in zip(paths, counts, strict=True) if not path.exists()]
    needed = sum(missing) * bytes_per_token(teacher().config.hidden_size)
    if needed > (free := shutil.disk_usage(run.training).free):
        raise SpecError(
            f"-o {run.directory}: needs {needed / 1e9:.1f} GB for what the model computes of its answers, and "
            f"{free / 1e9:.1f} GB are free; take fewer --tokens, or another disk"
        )
    progress.begin("features", sum(counts), sum(counts) - sum(missing))
    texts: list[CachedAnswer] = []
    for path, part in zip(paths, parts, strict=True):
        texts += cached(path, part, teacher, told=progress.advance)
    return texts


class _Lessons:
    """The steps of a run: a function of the texts and the seed, whatever interrupts them."""

    def __init__(
        self,
        run: Run,
        learner: Learner,
        plan: Sequence[Sequence[Sequence[CachedAnswer]]],
        held_out: Sequence[CachedAnswer],
        *,
        rate: float,
        dtype: torch.dtype,
    ) -> None:
        self._run = run
        self._learner = learner
        self._held_out = held_out
        self._rate = rate  # of learning, at most
        self._dtype = dtype
        self._plan = plan  # of each pass its steps' texts
        self._num_steps = sum(map(len, plan))
        self._optimizer = torch.optim.AdamW(
            learner.module.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def give(self, progress: TrainingProgress, *, save_every_s: float) -> None:
        done = self._run.restore(self._learner.module, self._optimizer)
        if not done:
            self._measure("untrained", progress)
        progress.begin("steps", self._num_steps, done)
        saved_at, step, loss = time.monotonic(), 0, 0.0
        for number, groups in enumerate(self._plan):
            for group in groups:
                step += 1
                if step <= done:
                    continue
                loss = self._step(group, step)
                if time.monotonic() - saved_at >= save_every_s and group is not groups[-1]:
                    self._run.save(step, self._learner.module, self._optimizer)
                    saved_at = time.monotonic()
                progress.advance(1, f"loss {loss:.3f}")
            if step > done:
                self._measure(f"pass {number + 1}", progress, loss=loss)
                self._run.publish(*self._learner.published())
                self._run.save(step, self._learner.module, self._optimizer)

    def _step(self, group: Sequence[CachedAnswer], step: int) -> float:
        for options in self._optimizer.param_groups:
            options["lr"] = self._rate * _share(step, self._num_steps)
        with self._autocast():
            loss = self._learner.loss(batch_of(group), number=step)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._learner.module.parameters(), _MAX_NORM, foreach=False)
        self._optimizer.step()
        return float(loss.detach())

    def _measure(self, when: str, progress: TrainingProgress, **more: float) -> None:
        with self._autocast():
            found = acceptance(self._learner, self._held_out)
        report = self._run.report()
        said = {key: value for key, value in report.get("held_out", {}).items() if key != when}
        self._run.note(report | {"held_out": said | {when: found.plain() | more}})
        places = ", ".join(f"{share:.0%}" for share in found.by_place)
        progress.say(
            f"{when}: {found.mean_length:.2f} tokens a step on {found.num_tokens} tokens held out; by place {places}"
        )

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._dtype == torch.bfloat16)


def _share(step: int, num_steps: int) -> float:
    """Of the rate of learning: rises, then falls as a cosine does."""
    falling = 0.5 * (1 + math.cos(math.pi * step / num_steps))
    return min(1.0, step / min(_WARM_UP, num_steps / 4)) * (_LAST_RATE + (1 - _LAST_RATE) * falling)
