"""Process that runs a model's steps on command, so that several can be timed concurrently.

python -m engine.tools.stepper PORT OPTIONS     see core.process.child_process
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from core.model.tokenizer_file import open_tokenizer
from core.process.child_process import obey
from engine.config import EngineConfig
from engine.runner.runner import ModelRunner
from engine.tools.losses import losses
from engine.tools.offline import decoding_engine, prefilling_engine

_BLOCK_SIZE = 16
# Decode steps per batch before a new batch starts.
_NUM_STEPS = 64
# Default of a decode replica.
_RECORDED_ROWS = 64


class Stepper:
    """Timed steps of one model. Every public method is a command."""

    def __init__(
        self,
        model_dir: str,
        *,
        dtype: str,
        weights: str,
        pool_dtype: str,
        threads: int,
        most_tokens: int,
        unquantized_layers: Sequence[int] = (),
    ) -> None:
        """most_tokens: total tokens held by the sequences of one step."""
        torch.set_num_threads(threads)
        self._model_dir = Path(model_dir)
        config = EngineConfig(
            model_dir=self._model_dir,
            dtype=dtype,
            weights=weights,
            pool_dtype=pool_dtype,
            unquantized_layers=tuple(unquantized_layers),
            block_size=_BLOCK_SIZE,
            num_blocks=most_tokens // _BLOCK_SIZE,
            recorded_rows=_RECORDED_ROWS,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )
        before = _held_bytes()
        self._runner = ModelRunner(config)
        pool = self._runner.pool
        pool_bytes = sum(tensor.nbytes for tensor in (*pool.codes, *pool.scales))
        self._memory = {
            "weights": _held_bytes() - before - pool_bytes,
            "kv_per_token": self._runner.layout.bytes_per_token() * self._runner.parallel.size,
        }

    def ready(self) -> None:
        """Return once the model is loaded."""

    def memory(self) -> dict[str, int]:
        """Return the bytes that weights hold beyond the process's start, and the bytes of a token's KV."""
        return self._memory

    def losses(self, windows: list[list[int]], context: int, wire_dtype: str) -> list[list[float]]:
        """Return the negative log likelihoods of the tokens after `context`, per window."""
        losses_WT = losses(self._runner, windows, context=context, wire_dtype=wire_dtype)
        found: list[list[float]] = losses_WT.tolist()
        return found

    def task_scores(self, tasks: list[str], limit: int | None) -> dict[str, dict[str, float]]:
        """Return the metrics of lm-eval's tasks; see engine.tools.lm_eval_model."""
        from engine.tools.lm_eval_model import task_scores

        tokenizer = open_tokenizer(self._model_dir)
        return task_scores(self._runner, tokenizer, tasks, limit)

    def prefill(self, num_tokens: int, seconds: float) -> float:
        """Prefill prompts, one step each, for at least `seconds`. Returns the mean seconds per step."""

        def step() -> None:
            prefilling_engine(self._runner, num_tokens, max_batch_tokens=num_tokens).step()

        return _mean_s(step, seconds)

    def decode(self, batch: int, context: int, seconds: float) -> float:
        """Decode `batch` sequences of about `context` tokens for at least `seconds`. Returns mean seconds per step."""
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
    # The first step touches new memory and is not timed.
    step()
    begin, count = time.perf_counter(), 0
    while count < 2 or time.perf_counter() - begin < seconds:
        step()
        count += 1
    return (time.perf_counter() - begin) / count


def _held_bytes() -> int:
    """Return the memory that this process holds: on its GPU, or else its resident set."""
    gc.collect()
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    obey(lambda: Stepper(**json.loads(sys.argv[2])))
