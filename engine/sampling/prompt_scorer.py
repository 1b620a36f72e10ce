"""Log-probabilities of prompt tokens, collected from the slices of a step's logits."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from torch import Tensor

from core.types.prompt_logprobs import PromptLogprobs
from engine.sampling.logprobs import logprobs_of
from engine.scheduler.prompt_scoring import ScoredRow
from engine.scheduler.step import ScheduledStep

# S scored positions of the step, N positions of one slice, V vocabulary, K likeliest


class Scorer:
    """Scorer of one step. Adds slices while the step is computed; small results stay on the device until `scores`."""

    def __init__(self, rows: list[ScoredRow]) -> None:
        self._rows = rows
        self._num_top = max(row.num_top for row in rows)
        self._targets_S: Tensor | None = None  # on the device of the first slice
        self._num_scored = 0
        self._slices: list[tuple[Tensor, ...]] = []

    @classmethod
    def of(cls, step: ScheduledStep | None) -> Scorer | None:
        """Return the scorer of a step and set the step's `scores`; None if it scores nothing."""
        if step is None or not step.scored:
            return None
        scorer = cls(step.scored)
        step.scores = scorer.scores
        return scorer

    def add(self, logits_NV: Tensor) -> None:
        """Score the next N positions. logits_NV: fp32, not kept."""
        end = self._num_scored + len(logits_NV)
        if self._targets_S is None:
            self._targets_S = self._place(logits_NV.device)
        targets_N = self._targets_S[self._num_scored : end]
        found = logprobs_of(logits_NV, targets_N, num_top=self._num_top)
        ranks_N = 1 + (logits_NV > logits_NV.gather(-1, targets_N.unsqueeze(-1))).sum(-1)
        is_finite_N = found.norms_N1.isfinite().squeeze(-1)
        columns = (found.logprobs_N, ranks_N.int(), found.top_ids_NK.int(), found.top_logprobs_NK, is_finite_N)
        self._slices.append(columns)
        self._num_scored = end

    def scores(self) -> list[PromptLogprobs | None]:
        """Return the scores row by row. Waits for the device."""
        ends = np.cumsum([len(row.next_tokens) for row in self._rows]).tolist()
        assert self._num_scored == ends[-1], "logits are missing for some scored positions"
        logprobs, ranks, top_ids, top_logprobs, is_finite = (
            torch.cat(slices).cpu().numpy() for slices in zip(*self._slices, strict=True)
        )
        scores: list[PromptLogprobs | None] = []
        for row, start, end in zip(self._rows, [0, *ends], ends, strict=False):
            one = PromptLogprobs(
                logprobs_P=logprobs[start:end],
                ranks_P=ranks[start:end],
                top_ids_PK=top_ids[start:end, : row.num_top],
                top_logprobs_PK=top_logprobs[start:end, : row.num_top],
            )
            scores.append(one if is_finite[start:end].all() else None)
        return scores

    def _place(self, device: torch.device) -> Tensor:
        """Upload the target tokens; only later work on the device waits for the copy."""
        targets = list(chain.from_iterable(row.next_tokens for row in self._rows))
        return torch.tensor(targets, pin_memory=device.type == "cuda").to(device, non_blocking=True)
