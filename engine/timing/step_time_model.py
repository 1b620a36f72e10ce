"""Model of a replica's step times, fitted to the steps while they run."""

from __future__ import annotations

import numpy as np

from core.types.step_timing import StepTiming
from engine.batch.batch import Batch

_KEEP = 0.99  # weight of the past at each new step of the same kind: about the last hundred count
_SUM_UP_EVERY = 8  # steps
# Solve at the latest after this many steps, or after this fraction of all steps so far. A solve costs a few percent of
# a small step.
_SOLVE_EVERY, _SOLVE_AFTER = 32, 1 / 4
_MIN_STEPS = 8  # fewer steps do not determine the four terms
# Limits the ratio of measured to expected time: beyond it the expectation is useless.
_MOST_SURPRISE = 10.0
_NUM_FEATURES = 4  # the terms of StepTiming
# Relative to each feature; gives each of two identical features a share.
_RIDGE = 1e-6

_Step = tuple[float, int, int, int, float]  # 1, tokens, pairs, context, seconds


class StepTimeModel:
    """Least squares with forgetting over steps of seconds ~ base + token · T + pair · A + context · C, no term below 0.

    Errors count relative to the expected time, so a step of one second does not drown many short ones. (Relative to the
    measured time, slow steps would count less than quick ones, and the mean on a noisy machine would come out too low.)
    Decode steps and prompt steps are forgotten separately, so the cost of prompts survives a time without prompts.
    """

    def __init__(self, *, min_steps: int = _MIN_STEPS) -> None:
        """min_steps: number of steps before the first fit."""
        self._sums = {kind: np.zeros((_NUM_FEATURES, _NUM_FEATURES)) for kind in (False, True)}
        self._targets = {kind: np.zeros(_NUM_FEATURES) for kind in (False, True)}
        self._steps: list[_Step] = []  # not in the sums yet, because adding eight at once costs as much as one
        self._num_steps = 0
        self._solve_at = min_steps
        self._timing: StepTiming | None = None

    def add(self, *, num_tokens: int, num_pairs: int, num_context: int, seconds: float) -> None:
        """Add one step; see core.types.step_timing."""
        self._steps.append((1.0, num_tokens, num_pairs, num_context, seconds))
        self._num_steps += 1
        if len(self._steps) == _SUM_UP_EVERY:
            self._sum_up()

    def observe(self, batch: Batch, seconds: float, *, only_decodes: bool) -> None:
        """Add one step with this batch. Beside prompts, a row of one token counts as a decoding row."""
        queries, contexts = batch.query_lens, batch.context_lens
        num_pairs, num_context = 0, int(contexts.sum())
        if not only_decodes:
            decodes = queries == 1
            own = queries * (queries + 1) // 2
            num_pairs = int((queries * (contexts - queries) + own)[~decodes].sum())
            num_context = int(contexts[decodes].sum())
        self.add(num_tokens=batch.num_tokens, num_pairs=num_pairs, num_context=num_context, seconds=seconds)

    @property
    def timing(self) -> StepTiming | None:
        """Fitted model, solved again every few steps; None before enough steps to learn it."""
        if self._num_steps >= self._solve_at:
            self._solve_at = self._num_steps + max(1, min(_SOLVE_EVERY, int(self._num_steps * _SOLVE_AFTER)))
            self._sum_up()
            sums = self._sums[False] + self._sums[True]
            solved = non_negative(sums, self._targets[False] + self._targets[True])
            self._timing = StepTiming(**dict(zip(("base_s", "token_s", "pair_s", "context_s"), solved, strict=True)))
        return self._timing

    def _sum_up(self) -> None:
        """Add the pending steps to the sums, in order; each decays the earlier ones of its kind."""
        for kind in (False, True):
            steps_S5 = np.array([step for step in self._steps if (step[2] > 0) is kind])
            if not len(steps_S5):
                continue
            seconds_S, features_S4 = steps_S5[:, 4], steps_S5[:, :4]
            expected_S = seconds_S
            if timing := self._timing:
                learnt_S = features_S4 @ (timing.base_s, timing.token_s, timing.pair_s, timing.context_s)
                expected_S = np.maximum(learnt_S, seconds_S / _MOST_SURPRISE)
            relative_S4 = features_S4 / expected_S[:, None]
            weights_S = _KEEP ** np.arange(len(steps_S5))[::-1]
            kept = _KEEP ** len(steps_S5)
            self._sums[kind] = self._sums[kind] * kept + (relative_S4 * weights_S[:, None]).T @ relative_S4
            self._targets[kind] = self._targets[kind] * kept + (weights_S * seconds_S / expected_S) @ relative_S4
        self._steps.clear()


def non_negative(sums: np.ndarray, targets: np.ndarray) -> list[float]:
    """Return the solution of sums · x = targets with x >= 0.

    Drops negative terms one by one, the most negative first.
    """
    scale = np.sqrt(np.diag(sums))
    kept = [i for i in range(len(targets)) if scale[i] > 0]
    solved = np.zeros(len(targets))
    while kept:
        scaled = sums[np.ix_(kept, kept)] / np.outer(scale[kept], scale[kept])
        found = np.linalg.solve(scaled + _RIDGE * np.eye(len(kept)), targets[kept] / scale[kept])
        if found.min() >= 0:
            solved[kept] = found / scale[kept]
            break
        del kept[int(found.argmin())]
    return [float(value) for value in solved]
