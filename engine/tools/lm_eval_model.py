"""Model of lm-eval (`pip install lm-eval`) that computes with one engine in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer

from core.types.request import Sampling
from engine.runner.runner import ModelRunner
from engine.tools.losses import logits_of
from engine.tools.offline import generate


def task_scores(
    runner: ModelRunner, tokenizer: Tokenizer, tasks: Sequence[str], limit: int | None
) -> dict[str, dict[str, float]]:
    """Return the metrics of each task. limit: examples per task; None: all."""
    model = EngineLM(runner, tokenizer)
    found = simple_evaluate(model=model, tasks=list(tasks), limit=limit, bootstrap_iters=0, log_samples=False)
    return {task: _numbers(metrics) for task, metrics in found["results"].items()}


class EngineLM(TemplateLM):  # type: ignore[misc]
    """Scores and generates one text at a time."""

    def __init__(self, runner: ModelRunner, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._runner, self._tokenizer = runner, tokenizer

    @property
    def eot_token_id(self) -> int:
        return self._runner.config.eos_token_ids[0]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return list(self._tokenizer.encode(string, add_special_tokens=bool(add_special_tokens)).ids)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return [self._scored(context, continuation) for _, context, continuation in requests]

    def _scored(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Return the log-likelihood of the continuation, and True if it is the greedy one."""
        ids = (context + continuation)[-self._runner.max_tokens :]
        first = len(ids) - len(continuation)
        logits_TV = logits_of(self._runner, ids[:-1], 0, len(ids) - 1)[first - 1 :]
        own_T = torch.tensor(ids[first:], device=logits_TV.device)
        of_own_T = logits_TV.log_softmax(-1).gather(-1, own_T.unsqueeze(-1))
        return float(of_own_T.double().sum()), torch.equal(logits_TV.argmax(-1), own_T)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        found = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self._runner.max_tokens, 1)
            found.append(sum(self._scored(*make_disjoint_window(window))[0] for window in windows))
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        return [self._continued(*request.args) for request in requests]

    def _continued(self, context: str, settings: Mapping[str, Any]) -> str:
        count = int(settings.get("max_gen_toks", 256))
        ids = self.tok_encode(context)[-(self._runner.max_tokens - count) :]
        sampling = Sampling(temperature=0.0, max_tokens=count)
        (tokens,) = generate(self._runner, [ids], sampling, max_batch_tokens=max(512, len(ids)))
        text = self._tokenizer.decode([token.token_id for token in tokens])
        stops = settings.get("until") or []
        for stop in [stops] if isinstance(stops, str) else stops:
            text = text.split(stop, 1)[0]
        return text


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric metrics; lm-eval's other entries describe the run."""
    values = {name: value for name, value in metrics.items() if "," in name and isinstance(value, int | float)}
    return {name.removesuffix(",none"): float(value) for name, value in values.items()}
