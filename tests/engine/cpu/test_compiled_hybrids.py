"""Compiled programs of models with recurrent layers and gates equal the separate layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.cpu.library import Kernels, Program
from engine.cpu.structs import Step
from engine.model import cpu_program, transformer
from engine.model.cpu_program import can_compile
from engine.runner.runner import ModelRunner
from tests.engine.steps import prompts
from tests.engine.tiny_models import DELTA_NET, MakeModel, MakeRunner

# Widths that the kernels support.
WIDE = DELTA_NET | {"linear_key_head_dim": 24, "linear_value_head_dim": 16}
ENDS_WITH_ATTENTION = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5", WIDE),
    "qwen3_5, attention last": ("qwen3_5", WIDE | ENDS_WITH_ATTENTION),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True}),
    "lfm2, attention last": ("lfm2", {"layer_types": ["conv", "conv", "full_attention"]}),
}
# torch's sigmoid may round a gate to the next number.
CLOSE = {"qwen3_5": {"atol": 2e-2, "rtol": 2e-2}, "lfm2": {"atol": 0, "rtol": 0}}
# Slots of three sequences, and one for a checkpoint.
SLOTS, CHECKPOINT = (3, 1, 2), 4
# (start, end) of three sequences' parts in each step.
STEPS = [[(0, 9), (0, 21), (0, 1)], [(9, 10), (21, 60), (1, 2)], [(10, 11), (60, 61), (2, 3)]]


def batch_of(parts: Sequence[tuple[int, int]], num_logits: Sequence[int]) -> Batch:
    """Build one step. The second sequence keeps a checkpoint after its first token."""
    rows = [
        Row(tokens[start:end], start, range(12 * i, 12 * i + 12), num_logits=wanted, state_index=SLOTS[i])
        for i, (tokens, (start, end), wanted) in enumerate(zip(prompts(61, 61, 61), parts, num_logits, strict=True))
    ]
    writes = np.array([[parts[0][1] - parts[0][0], CHECKPOINT]])
    is_long = parts[1][1] - parts[1][0] > 1
    batch = Batch.of(rows, block_size=8)
    return replace(batch, state_writes=writes) if is_long else batch


def states_of(runner: ModelRunner) -> list[Tensor]:
    return [part for layer in runner.pool.states for part in layer.tensors if part.numel()]


@pytest.mark.parametrize("weights", ["auto", "int8"])
@pytest.mark.parametrize("name", CASES)
def test_compiled_hybrid_equals_separate_layers(
    kernels: Kernels,
    tiny_model: MakeModel,
    make_runner: MakeRunner,
    name: str,
    weights: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit-identical but for the gates' sigmoid; on_layer is called for layers with keys and values only."""
    family, changes = CASES[name]
    directory, _ = tiny_model(family, **changes)
    at_once, alone = runners(make_runner, directory, weights)
    compiled: list[bool] = []
    monkeypatch.setattr(transformer, "can_compile", lambda layers: compiled.append(can_compile(layers)) or compiled[-1])
    for parts in STEPS:
        batch, written_layers = batch_of(parts, (1, 1, 1)), list[int]()
        got = at_once.forward(batch, written_layers.append)
        with monkeypatch.context() as patch:
            patch.setattr(transformer, "can_compile", lambda layers: False)
            wanted = alone.forward(batch)
        torch.testing.assert_close(got, wanted, **CLOSE[family])
        for ours, theirs in zip(states_of(at_once), states_of(alone), strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE[family])
        assert written_layers == [0]
    assert compiled == [True]


def runners(make_runner: MakeRunner, directory: Path, weights: str = "auto") -> list[ModelRunner]:
    return [make_runner(directory, dtype="bfloat16", weights=weights) for _ in range(2)]


@pytest.mark.parametrize("num_logits", [(1, 0, 1), (0, 0, 0)])
@pytest.mark.parametrize("name", CASES)
def test_last_layer_of_a_hybrid_skips_positions_without_logits(
    kernels: Kernels,
    tiny_model: MakeModel,
    make_runner: MakeRunner,
    name: str,
    num_logits: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The states still take in every position."""
    family, changes = CASES[name]
    directory, _ = tiny_model(family, **changes)
    some, everything = runners(make_runner, directory)
    computed: list[int] = []
    compute = Program.run

    def note(self: Program, step: Step, **part: int | None) -> None:
        computed.append(step.tokens)
        compute(self, step, **part)

    for parts in STEPS[:2]:
        batch = batch_of(parts, num_logits)
        with monkeypatch.context() as patch:
            patch.setattr(cpu_program.Program, "run", note)
            got = some.forward(batch)
        with monkeypatch.context() as patch:
            patch.setattr(transformer, "can_compile", lambda layers: False)
            wanted = everything.forward(batch)
        torch.testing.assert_close(got, wanted, **CLOSE[family])
        for ours, theirs in zip(states_of(some), states_of(everything), strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE[family])
    assert computed[:2] == [31, sum(num_logits)]
