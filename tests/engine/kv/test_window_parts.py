"""A pool whose window layers keep only the parts that coming queries see computes the logits of a whole pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import EngineConfig
from engine.kv.pool import KVPool
from engine.runner.runner import ModelRunner
from tests.engine.fake_capture import FakeReplays
from tests.engine.steps import DecodeSteps, as_on_gpu, prompts
from tests.engine.tiny_models import GEMMA, GEMMA3_ROPES, GEMMA4, GPT_OSS, LLAMA4, MakeModel, MakeRunner

BLOCK_SIZE = 8
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": GEMMA | {"rope_parameters": GEMMA3_ROPES, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4": GEMMA4,
    "gpt_oss": GPT_OSS,
    "mistral": {"sliding_window": 9},
    "llama4": LLAMA4,
}
FAMILIES["gemma3"]["num_hidden_layers"] = 4
Forward = Callable[[ModelRunner, Batch], Tensor]


def by_runner(runner: ModelRunner, batch: Batch) -> Tensor:
    return runner.forward(batch)


class Windows:
    """Parts of one sequence's blocks: attached for the next positions, given back when no query sees them."""

    def __init__(self, pool: KVPool) -> None:
        assert pool.window_of is not None
        self._pool, self._size = pool, pool.layout.block_size
        self._free = np.random.default_rng(5).permutation(np.arange(1, pool.num_window_parts)).tolist()

    def advance(self, blocks: list[int], start: int, end: int) -> None:
        """Keep the blocks that queries at [start, end) see."""
        first = max(0, start - self._pool.layout.window + 1) // self._size
        window_of = self._pool.window_of
        assert window_of is not None
        for block in blocks[:first]:
            if part := int(window_of[block]):
                self._pool.attach([(block, 0)])
                self._free.append(part)
                for layer, codes in enumerate(self._pool.codes):
                    if self._pool.layout.is_windowed(layer):
                        codes[part].fill_(7.0)  # another sequence's
        for block in blocks[first : -(-end // self._size)]:
            if not window_of[block]:
                self._pool.attach([(block, self._free.pop(0))])


def logits_of(runner: ModelRunner, spans: list[tuple[int, int]], forward: Forward) -> list[Tensor]:
    """Compute one prompt in these spans over blocks in reverse order."""
    (tokens,), blocks = prompts(spans[-1][1]), list(range(15, -1, -1))
    windows, found = Windows(runner.pool) if runner.pool.window_of is not None else None, []
    for start, end in spans:
        if windows:
            windows.advance(blocks, start, end)
        row = Row(tokens[start:end], start=start, blocks=blocks, num_logits=end - start)
        found.append(forward(runner, Batch.of([row], block_size=BLOCK_SIZE)).clone())
    return found


SPANS = [(0, 5), (5, 40), (40, 41), (41, 42), (42, 76), *((i, i + 1) for i in range(76, 84))]


def parts_needed(window: int) -> int:
    return -(-(window + 37) // BLOCK_SIZE) + 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("forward", [by_runner, as_on_gpu])
def test_parts_hold_what_queries_see(
    family: str, forward: Forward, tiny_model: MakeModel, make_runner: MakeRunner
) -> None:
    directory, _ = tiny_model(family, **FAMILIES[family])
    whole = make_runner(directory)
    freed = make_runner(directory, frees_windows=True, num_window_parts=parts_needed(16))
    assert freed.pool.num_window_parts < 16 and freed.layout.fingerprint != whole.layout.fingerprint
    expected, found = logits_of(whole, SPANS, forward), logits_of(freed, SPANS, forward)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("pool_dtype", ["auto", "fp8_e4m3", "int4"])
def test_compiled_programs_use_parts(
    family: str, pool_dtype: str, tiny_model: MakeModel, make_runner: MakeRunner
) -> None:
    """In bf16 the C++ kernels compute, whole models as one program."""
    directory, _ = tiny_model(family, **FAMILIES[family])
    options = {"dtype": "bfloat16", "pool_dtype": pool_dtype}
    whole = make_runner(directory, **options)
    freed = make_runner(directory, frees_windows=True, num_window_parts=parts_needed(16), **options)
    expected, found = logits_of(whole, SPANS, by_runner), logits_of(freed, SPANS, by_runner)
    assert all(map(torch.equal, found, expected))


def test_replayed_steps_use_parts(tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    """Static window tables follow rows whose blocks begin at different steps."""
    directory, _ = tiny_model("gemma3", **FAMILIES["gemma3"])
    config = EngineConfig(model_dir=directory, dtype="float32", block_size=BLOCK_SIZE, num_blocks=40)
    replays, tables = FakeReplays(), [list(range(15)), list(range(20, 35))]
    whole = ModelRunner(config)
    freed = ModelRunner(
        replace(config, frees_windows=True, num_window_parts=parts_needed(16) + 4, recorded_rows=4), capture=replays
    )
    windows, contexts, tokens = Windows(freed.pool), [29, 44], prompts(29, 44)
    for runner in (whole, freed):
        for table, context, prompt in zip(tables, contexts, tokens, strict=True):
            if runner is freed:
                windows.advance(table, 0, context)
            row = Row(prompt, start=0, blocks=table, num_logits=1)
            runner.forward(Batch.of([row], block_size=BLOCK_SIZE))
            if runner is freed:
                windows.advance(table, context, context)
    steps = [DecodeSteps([context + 1 for context in contexts], tables, block_size=BLOCK_SIZE) for _ in range(2)]
    num_replayed = replays.num_replays
    for position in range(40):
        for table, context in zip(tables, contexts, strict=True):
            windows.advance(table, context + position, context + position + 1)
        expected, found = (as_on_gpu(whole, steps[0].batch()), freed.forward(steps[1].batch()))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert replays.num_replays == num_replayed + 40
