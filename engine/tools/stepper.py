"""One process that takes a model's steps on order, so that several can be timed at the same moment.

python -m engine.tools.stepper PORT OPTIONS     see core.process.child_process
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from core.process.child_process import obey
from engine.config import EngineConfig
from engine.runner.runner import ModelRunner
from engine.tools.loaded_engines import decoding_engine, prefilling_engine

_BLOCK_SIZE = 16
_NUM_STEPS = 64  # of one batch, before it begins anew
_RECORDED_ROWS = 64  # as in a decode replica, if the operator says nothing


class Stepper:
    """Every public method is an order."""

    def __init__(
        self, model_dir: str, *, dtype: str, weights: str, pool_dtype: str, threads: int, most_tokens: int
    ) -> None:
        """`most_tokens` are held by the sequences of one step, all together."""
        torch.set_num_threads(threads)
        config = EngineConfig(
            model_dir=Path(model_dir),
            dtype=dtype,
            weights=weights,
            pool_dtype=pool_dtype,
            block_size=_BLOCK_SIZE,
            num_blocks=most_tokens // _BLOCK_SIZE,
            recorded_rows=_RECORDED_ROWS,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )
        self._runner = ModelRunner(config)

    def ready(self) -> None:
        """The model is there."""

    def prefill(self, num_tokens: int, seconds: float) -> float:
        """Prompts, each in one step, for so long at least: mean seconds of a step."""

        def step() -> None:
            prefilling_engine(self._runner, num_tokens, max_batch_tokens=num_tokens).step()

        return _mean_s(step, seconds)

    def decode(self, batch: int, context: int, seconds: float) -> float:
        """Steps of `batch` sequences of about `context` tokens, for so long at least: mean seconds of a step."""
        total_s, num_steps = 0.0, 0
        while total_s < seconds:
            engine = decoding_engine(self._runner, self._runner, batch=batch, context=context)
            begin = time.perf_counter()
            for _ in range(_NUM_STEPS):
                engine.step()
                num_steps += 1
                if total_s + time.perf_counter() - begin >= seconds:
                    break
            total_s += time.perf_counter() - begin
        return total_s / num_steps


def _mean_s(step: Callable[[], None], seconds: float) -> float:
    step()  # the first meets memory that was never touched
    begin, count = time.perf_counter(), 0
    while count < 2 or time.perf_counter() - begin < seconds:
        step()
        count += 1
    return (time.perf_counter() - begin) / count


if __name__ == "__main__":
    obey(lambda: Stepper(**json.loads(sys.argv[2])))
