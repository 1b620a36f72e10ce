"""Compiled programs of whole models equal the separate layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.cpu.library import Kernels, Program
from engine.cpu.structs import Step
from engine.kernels.gated_mul import GatedActivation
from engine.layers.layers import Linear, RMSNorm
from engine.layers.packed_matrix import PackedMatrix
from engine.model import cpu_program, transformer
from engine.model.cpu_program import can_compile
from engine.model.decoder_layer import DecoderLayer
from engine.model.gated_mlp import GatedMLP
from engine.runner.runner import ModelRunner
from tests.engine.steps import prompts
from tests.engine.steps import random_bf16 as random
from tests.engine.tiny_models import DELTA_NET, MakeModel, MakeRunner

# Widths that the kernels support.
WIDE = DELTA_NET | {"linear_key_head_dim": 24, "linear_value_head_dim": 16}
ENDS_WITH_ATTENTION = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": 11}),
    "varied": ("llama", {}),
    "qwen3_5": ("qwen3_5", WIDE),
    "qwen3_5, attention last": ("qwen3_5", WIDE | ENDS_WITH_ATTENTION),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True}),
    "lfm2, attention last": ("lfm2", {"layer_types": ["conv", "conv", "full_attention"]}),
}
# torch's sigmoid may round a gate to the next number.
CLOSE = {"qwen3_5": {"atol": 2e-2, "rtol": 2e-2}}
EXACT = {"atol": 0, "rtol": 0}
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


def varied(kernels: Kernels, layers: list[DecoderLayer]) -> None:
    """Change layers in all ways in which layers may differ; the last one reads the keys and values of the second."""
    hidden, narrow, last = layers[0].input_norm.weight.shape[0], 24, len(layers) - 1
    for i, layer in enumerate(layers):
        norm = RMSNorm(random(hidden, seed=i).float(), 1e-6)
        mlp = GatedMLP(layer.mlp.gate_up, layer.mlp.down, GatedActivation("gelu_pytorch_tanh"), norm)
        attention = replace(layer.attention, soft_cap=3.0, scale=0.4, layer=min(i, last - 1), stores=i < last)
        qkv = layer.qkv
        if i == 1:
            gate_up, down = (random(*shape) / shape[1] ** 0.5 for shape in ((2 * narrow, hidden), (hidden, narrow)))
            parts = Linear(PackedMatrix.bf16(kernels, gate_up)), PackedMatrix.bf16(kernels, down)
            mlp = replace(mlp, gate_up=parts[0], down=replace(mlp.down, matrix=parts[1]))
        if i == last:
            num_features = layer.output.matrix.num_inputs
            qkv = Linear(PackedMatrix.bf16(kernels, random(num_features, hidden) / hidden**0.5))
        layers[i] = replace(layer, attention=attention, qkv=qkv, mlp=mlp, output_norm=norm)


def runners(
    kernels: Kernels, make_runner: MakeRunner, tiny_model: MakeModel, name: str, weights: str = "auto"
) -> list[ModelRunner]:
    family, changes = CASES[name]
    directory, _ = tiny_model(family, **changes)
    made = [make_runner(directory, dtype="bfloat16", weights=weights) for _ in range(2)]
    for runner in made if name == "varied" else ():
        varied(kernels, runner._model._layers)
    return made


def check_separate(runner: ModelRunner, compiled: ModelRunner, batch: Batch, got: Tensor, name: str) -> None:
    """Compare a compiled step with one of the separate layers, also in its states."""
    close = CLOSE.get(CASES[name][0], EXACT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer, "can_compile", lambda layers: False)
        wanted = runner.forward(batch)
    torch.testing.assert_close(got, wanted, **close)
    for ours, theirs in zip(states_of(compiled), states_of(runner), strict=True):
        torch.testing.assert_close(ours, theirs, **close)


@pytest.mark.parametrize(
    ("name", "weights"),
    [(name, weights) for name in CASES for weights in ("auto", "int8") if (name, weights) != ("varied", "int8")],
)
def test_compiled_model_equals_separate_layers(
    kernels: Kernels,
    tiny_model: MakeModel,
    make_runner: MakeRunner,
    name: str,
    weights: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit-identical but for gates of qwen3_5, also when buffers grow; on_layer follows the write of a layer's KV."""
    at_once, alone = runners(kernels, make_runner, tiny_model, name, weights)
    written = [getattr(layer, "written", None) for layer in at_once._model._layers]
    pool_layers = [layer for layer in written if layer is not None]
    compiled: list[bool] = []
    monkeypatch.setattr(transformer, "can_compile", lambda layers: compiled.append(can_compile(layers)) or compiled[-1])
    for parts in STEPS:
        written_layers: list[int] = []

        def on_layer(layer: int, end: int = parts[0][1], written_layers: list[int] = written_layers) -> None:
            block, place = divmod(end - 1, 8)
            assert at_once.pool.codes[layer][block, 0, :, place].any(), "the layer's last key is not written yet"
            written_layers.append(layer)

        batch = batch_of(parts, (1, 1, 1))
        got = at_once.forward(batch, on_layer)
        check_separate(alone, at_once, batch, got, name)
        assert written_layers == pool_layers
    assert compiled == [True]


@pytest.mark.parametrize("num_logits", [(1, 0, 1), (0, 0, 0)])
@pytest.mark.parametrize("name", ["qwen2", *(name for name in CASES if CASES[name][0] in ("qwen3_5", "lfm2"))])
def test_last_layer_skips_positions_without_logits(
    kernels: Kernels, tiny_model: MakeModel, make_runner: MakeRunner, name: str, num_logits: tuple[int, ...]
) -> None:
    """Gives the same as with all positions, for decode rows beside chunks; states take in every position."""
    some, everything = runners(kernels, make_runner, tiny_model, name)
    computed: list[int] = []
    compute = Program.run

    def note(self: Program, step: Step, **part: int | None) -> None:
        computed.append(step.tokens)
        compute(self, step, **part)

    for parts in STEPS[:2]:
        batch = batch_of(parts, num_logits)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu_program.Program, "run", note)
            got = some.forward(batch)
        check_separate(everything, some, batch, got, name)
    assert computed[:2] == [31, sum(num_logits)]
