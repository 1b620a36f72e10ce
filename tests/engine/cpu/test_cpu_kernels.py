"""CPU kernels compared with torch; a row's result does not depend on the other rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.cpu_heads import CompiledHeads
from engine.attention.heads import TorchHeads
from engine.attention.layer_attention import Angles, LayerAttention
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.cpu import library
from engine.cpu.library import Kernels, Program, open_kernels
from engine.cpu.structs import Step
from engine.kernels.gated_mul import SILU, GatedActivation
from engine.kernels.kv_wire import reference_pack_kv, reference_unpack_kv, wire_of
from engine.kernels.quant.row_quantization import SCALES, as_bytes
from engine.kv.checksum import sum_words
from engine.kv.layout import DTYPES, KVLayout
from engine.kv.pool import KVPool
from engine.layers.layers import Before, Linear, RMSNorm, TorchMatrix
from engine.layers.packed_matrix import PackedMatrix
from engine.model import cpu_program, transformer
from engine.model.cpu_program import CompiledHead, can_compile
from engine.model.decoder_layer import DecoderLayer
from engine.model.gated_mlp import GatedMLP
from tests.engine.naive_attention import NaiveHeads
from tests.engine.steps import prompts
from tests.engine.tiny_models import MakeModel, MakeRunner
from tests.support.disks import FakeDisk

# T tokens, I input features, O output features, N heads of queries, keys and values, D head_dim, F = D / 2

CPU = torch.device("cpu")
SHAPES = [
    (1, 576, 576),
    (2, 131, 48),
    (5, 40, 30),
    (7, 960, 100),
    (12, 17, 33),
    (13, 300, 64),
    (120, 48, 576),
]  # T, O, I
BLOCK_SIZE, NUM_BLOCKS = 8, 90
# (start, count): prompts, later chunks and single tokens of very different lengths.
SPANS = [(0, 1), (0, 9), (29, 1), (13, 6), (4, 1), (0, 40), (199, 1), (16, 4), (3, 1), (30, 1), (31, 1)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def mean_error(got: Tensor, exact: Tensor) -> float:
    return float((got.float() - exact).abs().mean() / exact.abs().mean())


# Few numbers reach this limit, and enough to notice that it is ignored.
SWIGLU = GatedActivation("swigluoai", alpha=1.7, limit=1.5)
GATED = [SILU, GatedActivation("gelu"), GatedActivation("gelu_pytorch_tanh"), SWIGLU, GatedActivation("relu2")]


def norm_of(num_features: int, dtype: torch.dtype = torch.bfloat16) -> RMSNorm:
    return RMSNorm(random(num_features, seed=3).to(dtype) + 0.1, 1e-5)


@pytest.mark.parametrize(
    ("shape", "before"),
    [
        *((shape, before) for shape in SHAPES for before in (None, "norm", SILU)),
        *((shape, before) for shape in SHAPES[3:5] for before in ("late norm", *GATED[1:])),
    ],
    ids=str,
)
def test_packed_matrix_is_as_accurate_as_torch(
    kernels: Kernels, shape: tuple[int, int, int], before: str | GatedActivation | None
) -> None:
    """Both round to bf16 at the same points, so that their errors against fp32 are equal."""
    num_rows, num_outputs, num_inputs = shape
    weight_OI = random(num_outputs, num_inputs) / num_inputs**0.5
    x_TI = random(num_rows, num_inputs * (before.num_inputs if isinstance(before, GatedActivation) else 1), seed=1)
    bias_O, residual_TO = random(num_outputs, seed=4), random(num_rows, num_outputs, seed=5)
    if isinstance(before, str):
        before = norm_of(num_inputs, torch.float32 if before == "late norm" else torch.bfloat16)
    exact: Before | None = before
    if isinstance(before, RMSNorm):
        exact = RMSNorm(before.weight.float(), before.eps)
    wanted = TorchMatrix(weight_OI.float()).multiply(
        x_TI.float(), bias_O=bias_O.float(), before=exact, residual_TO=residual_TO.float()
    )
    extras = {"bias_O": bias_O, "before": before, "residual_TO": residual_TO}
    ours = PackedMatrix.bf16(kernels, weight_OI).multiply(x_TI, **extras)
    theirs = TorchMatrix(weight_OI).multiply(x_TI, **extras)
    assert ours.shape == wanted.shape and ours.dtype == torch.bfloat16
    assert mean_error(ours, wanted) < 1.2 * mean_error(theirs, wanted)
    assert mean_error(PackedMatrix.int8(kernels, weight_OI).multiply(x_TI, **extras), wanted) < 0.02


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_row_does_not_depend_on_other_rows(kernels: Kernels, kind: str) -> None:
    weight_OI, x_TI = random(300, 100), random(50, 100, seed=1)
    matrix = getattr(PackedMatrix, kind)(kernels, weight_OI)
    whole = matrix.multiply(x_TI)
    # Every tile size, and one row more than fits.
    for count in (*range(1, 14), 49):
        torch.testing.assert_close(matrix.multiply(x_TI[7 : 7 + count]), whole[7 : 7 + count], atol=0, rtol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_nan_and_inf_propagate(kernels: Kernels, kind: str, value: float) -> None:
    """Otherwise invalid logits would go unnoticed."""
    x_TI = random(3, 100, seed=1)
    x_TI[1, 99] = value
    got = getattr(PackedMatrix, kind)(kernels, random(300, 100)).multiply(x_TI)
    assert got.isfinite().all(dim=1).tolist() == [True, False, True]
    assert not got[1].isfinite().any()


def test_int8_product_equals_its_formula(kernels: Kernels) -> None:
    weight_OI, x_TI = random(40, 64), random(3, 64, seed=1)
    w_scale = weight_OI.float().abs().amax(1, keepdim=True) / 127
    x_scale = x_TI.float().abs().amax(1, keepdim=True) / 127
    w, x = (weight_OI.float() / w_scale).round(), (x_TI.float() / x_scale).round()
    wanted = (x @ w.T * x_scale * w_scale.T).bfloat16()
    got = PackedMatrix.int8(kernels, weight_OI).multiply(x_TI)
    torch.testing.assert_close(got, wanted, atol=2e-3 * float(wanted.abs().max()), rtol=8e-3)


FULL = LayerAttention(layer=0, scale=64**-0.5)


def make_pool(dtype: str, *, head_dim: int) -> KVPool:
    layout = KVLayout(model="m", num_layers=2, num_kv_heads=2, head_dim=head_dim, block_size=BLOCK_SIZE, dtype=dtype)
    return KVPool(layout, num_blocks=NUM_BLOCKS, device=CPU)


def filled_pool(dtype: str, head_dim: int) -> KVPool:
    """Make a pool in which every slot is filled, so that reads of wrong places are noticed."""
    pool, slots_T = make_pool(dtype, head_dim=head_dim), torch.arange(NUM_BLOCKS * BLOCK_SIZE)
    pool.write(1, slots_T, *(random(len(slots_T), 2, head_dim, seed=seed) for seed in (7, 8)))
    return pool


def make_batch(spans: list[tuple[int, int]]) -> Batch:
    order = np.random.default_rng(0).permutation(NUM_BLOCKS).tolist()
    rows = []
    for start, count in spans:
        blocks = [order.pop() for _ in range(-(-(start + count) // BLOCK_SIZE))]
        rows.append(Row(token_ids=range(count), start=start, blocks=blocks, num_logits=1))
    return Batch.of(rows, block_size=BLOCK_SIZE)


# A value in bf16 that is rounded elsewhere may get the next code.
STORED_ERRORS = {"bfloat16": 4e-3, "fp8_e4m3": 0.01, "int8": 0.015, "int4": 0.06}
EARLY, LATE = torch.bfloat16, torch.float32
# Dtype of the pool, head_dim, and fields of LayerAttention; norms by the dtype of their weights, sinks by their mean.
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("bfloat16", 64, {}),
    ("bfloat16", 12, {"window": 21, "sinks": 1.0, "rope": 1}),
    ("bfloat16", 80, {"chunk": 16, "soft_cap": 1.5, "q_norm": LATE, "k_norm": LATE}),
    ("bfloat16", 112, {"window": 1, "soft_cap": 1.5, "sinks": -1.0, "v_norm": LATE, "rope": 2}),
    ("bfloat16", 512, {"scale": 0.08, "q_norm": EARLY, "rope": 1}),
    ("fp8_e4m3", 64, {"chunk": 7, "sinks": 2.0, "scale": 0.2}),
    ("fp8_e4m3", 80, {"window": 21, "q_norm": EARLY, "k_norm": EARLY}),
    ("fp8_e4m3", 96, {"stores": False, "soft_cap": 1.5, "q_norm": LATE}),
    ("fp8_e4m3", 256, {"window": 1, "v_norm": EARLY, "rope": 1}),
    ("fp8_e4m3", 320, {"soft_cap": 1.5, "rope": 2}),
    ("int8", 12, {"soft_cap": 1.5, "q_norm": EARLY, "k_norm": EARLY}),
    ("int8", 64, {"window": 1, "rope": 1, "scale": 0.3}),
    ("int8", 192, {"window": 21, "soft_cap": 1.5, "sinks": 1.0, "rope": 2}),
    ("int8", 512, {"chunk": 16, "q_norm": LATE, "k_norm": LATE, "v_norm": LATE}),
    ("int4", 12, {"chunk": 16, "scale": 0.5, "v_norm": EARLY}),
    ("int4", 64, {"window": 21, "soft_cap": 1.5, "q_norm": EARLY, "k_norm": EARLY}),
    ("int4", 80, {"window": 1}),
    ("int4", 112, {"sinks": 1.0, "rope": 1}),
    ("int4", 256, {"chunk": 7, "soft_cap": 1.5, "sinks": 2.0, "q_norm": LATE, "k_norm": LATE}),
    ("int4", 512, {"stores": False, "window": 21, "rope": 2, "scale": 0.06}),
]


def attention_of(fields: dict[str, Any], head_dim: int) -> LayerAttention:
    """Build the description of a case, for 6 query heads."""
    fields = {"scale": head_dim**-0.5} | fields
    for number, name in enumerate(("q_norm", "k_norm", "v_norm")):
        if name in fields:
            weight_D = random(head_dim, seed=20 + number).to(fields[name]) + 0.5
            fields[name] = RMSNorm(weight_D, 1e-6)
    if "sinks" in fields:
        fields["sinks_H"] = fields.pop("sinks") + random(6, seed=30).float()
    return LayerAttention(layer=1, **fields)


def make_angles(batch: Batch, head_dim: int) -> Angles:
    """Build angles of whole heads, of a part that fills no vector, and of none."""
    positions_T11 = torch.from_numpy(batch.positions)[:, None, None]
    turns = [positions_T11 * torch.linspace(1, 0.01, half) for half in (head_dim // 2, head_dim // 2 * 3 // 4 | 1, 0)]
    return [(turn.cos().bfloat16(), turn.sin().bfloat16()) for turn in turns]


@pytest.mark.parametrize("backend", ["compiled", "torch"])
@pytest.mark.parametrize(("dtype", "head_dim", "fields"), CASES, ids=str)
def test_heads_conform(kernels: Kernels, dtype: str, head_dim: int, fields: dict[str, Any], backend: str) -> None:
    batch, attention = make_batch(SPANS), attention_of(fields, head_dim)
    heads_TND = random(batch.num_tokens, 6 + (4 if attention.stores else 0), head_dim)
    angles, pool, untouched = make_angles(batch, head_dim), filled_pool(dtype, head_dim), filled_pool(dtype, head_dim)
    heads = TorchHeads(batch, pool, angles) if backend == "torch" else CompiledHeads(kernels, batch, pool, angles)
    got = heads.attend(attention, heads.store(attention, heads_TND.clone()))
    naive = NaiveHeads(batch, angles, attention, heads_TND, num_kv=2)
    stored_2KLD, untouched_2KLD = (some.read(1, torch.arange(NUM_BLOCKS), torch.float32) for some in (pool, untouched))
    if attention.stores:
        exact = make_pool(dtype, head_dim=head_dim)
        exact.write(1, torch.from_numpy(batch.slots), naive.keys().bfloat16(), naive.values().bfloat16())
        exact_2KTD = exact.read(1, torch.arange(NUM_BLOCKS), torch.float32)[:, :, batch.slots]
        for side in (0, 1):
            assert mean_error(stored_2KLD[side, :, batch.slots], exact_2KTD[side]) < STORED_ERRORS[dtype]
        stored_2KLD[:, :, batch.slots] = untouched_2KLD[:, :, batch.slots]
    assert torch.equal(stored_2KLD, untouched_2KLD)
    wanted = naive.attended(pool)
    torch.testing.assert_close(got.double(), wanted, atol=0.05, rtol=0.02)
    assert mean_error(got, wanted) < 4e-3


@pytest.mark.parametrize("dtype", [EARLY, LATE])
def test_norms_round_where_torch_rounds(kernels: Kernels, dtype: torch.dtype) -> None:
    """Sums in another order change the last bit of a few numbers; another rounding changes that of many."""
    norm, x_TD = norm_of(64, dtype), random(200, 64, seed=1)
    product_TD = PackedMatrix.bf16(kernels, torch.eye(64)).multiply(x_TD, before=norm)
    no_angles = torch.empty(200, 1, 0, dtype=torch.bfloat16)
    heads = CompiledHeads(kernels, make_batch([(0, 200)]), make_pool("bfloat16", head_dim=64), [(no_angles, no_angles)])
    q_T1D = heads.store(replace(FULL, q_norm=norm, stores=False), x_TD.clone().unsqueeze(1))
    for got_TD in (product_TD, q_T1D.squeeze(1)):
        assert (got_TD == norm(x_TD)).float().mean() > 0.98


@pytest.mark.parametrize("dtype", ["bfloat16", "int4"])
def test_attention_does_not_depend_on_chunking(kernels: Kernels, dtype: str) -> None:
    """A prompt at once, and in chunks beside other rows, gives identical bits."""
    heads_TND = random(170, 10, 64)
    angles = torch.arange(170)[:, None, None] * torch.linspace(1, 0.01, 32)
    cos_T1F, sin_T1F = angles.cos().bfloat16(), angles.sin().bfloat16()

    def attended(cuts: list[int]) -> Tensor:
        pool, parts = make_pool(dtype, head_dim=64), []
        for start, end in pairwise(cuts):
            row = Row(token_ids=range(end - start), start=start, blocks=range(33, 55), num_logits=1)
            other = Row(token_ids=[0], start=19, blocks=range(20, 30), num_logits=1)
            batch = Batch.of([row, other], block_size=BLOCK_SIZE)
            extra = [*range(start, end), 19]
            heads = CompiledHeads(kernels, batch, pool, [(cos_T1F[extra], sin_T1F[extra])])
            q_THD = heads.store(FULL, heads_TND[extra])
            parts.append(heads.attend(FULL, q_THD)[:-1])
        return torch.cat(parts)

    whole = attended([0, 170])
    for cuts in ([0, 1, 2, 170], [0, 16, 17, 40, 70, 131, 170], list(range(171))):
        torch.testing.assert_close(attended(cuts), whole, atol=0, rtol=0)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("side", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3", "int4"])
def test_nan_affects_only_its_own_sequence(kernels: Kernels, dtype: str, side: int) -> None:
    """A NaN key or value spoils its own sequence and leaves nothing in buffers that the next one uses."""
    pool, batch = make_pool(dtype, head_dim=64), make_batch([(80, 1), (2, 1), (0, 3)])
    slots_T = torch.arange(NUM_BLOCKS * BLOCK_SIZE)
    pool.write(0, slots_T, *(random(len(slots_T), 2, 64, seed=seed) for seed in (7, 8)))
    q_THD = random(batch.num_tokens, 6, 64)
    heads = CompiledHeads(kernels, batch, pool, [(torch.ones(batch.num_tokens, 1, 32, dtype=torch.bfloat16),) * 2])
    wanted = heads.attend(FULL, q_THD)
    block = int(batch.block_tables[0, 74 // BLOCK_SIZE])
    # int4: scale and zero.
    (pool.scales or pool.codes)[0].view(torch.bfloat16).unflatten(3, (BLOCK_SIZE, -1))[
        block, side, :, 74 % BLOCK_SIZE
    ] = float("nan")
    got = heads.attend(FULL, q_THD)
    assert got[0].isnan().all()
    torch.testing.assert_close(got[1:], wanted[1:], atol=0, rtol=0)


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


@pytest.mark.parametrize(
    ("family", "weights"),
    [
        *((family, weights) for family in ("qwen2", "qwen3", "mistral") for weights in ("auto", "int8")),
        ("varied", "auto"),
    ],
)
def test_compiled_layers_equal_separate_layers(
    kernels: Kernels,
    tiny_model: MakeModel,
    make_runner: MakeRunner,
    family: str,
    weights: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit-identical, also when buffers grow; on_layer is called only after the layer's KV is written."""
    changes = {"sliding_window": 11} if family == "mistral" else {}
    directory, _ = tiny_model("llama" if family == "varied" else family, **changes)
    at_once, alone = (make_runner(directory, dtype="bfloat16", weights=weights) for _ in range(2))
    if family == "varied":
        for runner in (at_once, alone):
            varied(kernels, runner._model._layers)
    pool_layers = [layer.written for layer in at_once._model._layers if layer.written is not None]
    compiled: list[bool] = []
    monkeypatch.setattr(transformer, "can_compile", lambda layers: compiled.append(can_compile(layers)) or compiled[-1])
    tokens = prompts(40)
    for start, end in ((0, 9), (9, 10), (10, 40)):
        written_layers: list[int] = []

        def on_layer(layer: int, slot: int = end - 1, written_layers: list[int] = written_layers) -> None:
            codes = at_once.pool.codes[layer]
            assert codes[slot // 8, 0, :, slot % 8].any(), "the layer's last key is not written yet"
            written_layers.append(layer)

        row = Row(token_ids=tokens[0][start:end], start=start, blocks=range(12), num_logits=1)
        batch = Batch.of([row], block_size=8)
        got = at_once.forward(batch, on_layer)
        with monkeypatch.context() as patch:
            patch.setattr(transformer, "can_compile", lambda layers: False)
            wanted = alone.forward(batch)
        torch.testing.assert_close(got, wanted, atol=0, rtol=0)
        assert written_layers == pool_layers
    assert compiled == [True]


@pytest.mark.parametrize("num_outputs", [48, 33])
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_compiled_head_equals_its_product(kernels: Kernels, kind: str, num_outputs: int) -> None:
    """Bit-identical for more rows than before and for fewer."""
    matrix = getattr(PackedMatrix, kind)(kernels, random(num_outputs, 40, seed=1))
    head, norm = Linear(matrix), RMSNorm(random(40, seed=3), 1e-5)
    compiled = CompiledHead(kernels, head, norm)
    for num_rows in (1, 13, 2, 0):
        x_RE = random(num_rows, 40, seed=num_rows)
        torch.testing.assert_close(compiled(x_RE), head(x_RE, before=norm).float(), atol=0, rtol=0)


@pytest.mark.parametrize("num_logits", [(1, 0, 1, 3), (0, 0, 0, 0)])
def test_last_layer_skips_positions_without_logits(
    kernels: Kernels,
    tiny_model: MakeModel,
    make_runner: MakeRunner,
    num_logits: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gives the same bits as with all positions, for decode rows beside chunks."""
    directory, _ = tiny_model("qwen2")
    some, everything = (make_runner(directory, dtype="bfloat16") for _ in range(2))
    rows = [
        Row(token_ids=range(3 * i, 3 * i + count), start=0, blocks=range(7 * i, 7 * i + 7), num_logits=wanted)
        for i, (count, wanted) in enumerate(zip((40, 50, 1, 7), num_logits, strict=True))
    ]
    batch = Batch.of(rows, block_size=8)
    computed: list[int] = []
    compute = Program.run

    def note(self: Program, step: Step, **part: int | None) -> None:
        computed.append(step.tokens)
        compute(self, step, **part)

    with monkeypatch.context() as patch:
        patch.setattr(cpu_program.Program, "run", note)
        got = some.forward(batch)
    with monkeypatch.context() as patch:
        patch.setattr(transformer, "can_compile", lambda layers: False)
        wanted = everything.forward(batch)
    assert computed[:2] == [98, sum(num_logits)]
    assert got.shape[0] == sum(num_logits)
    torch.testing.assert_close(got, wanted, atol=0, rtol=0)


def test_without_a_compiler_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    library.load_kernels.cache_clear()
    try:
        assert open_kernels(dtype=torch.bfloat16, device=CPU) is None
    finally:
        library.load_kernels.cache_clear()


def test_library_is_synced_before_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library counts as compiled once it exists; a partial one would disable the kernels for good."""
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nfor made; do :; done\n[ "$made" = --version ] || echo no library > "$made"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("CLUSTER_CACHE", str(tmp_path))

    def compiled() -> Path:
        library.load_kernels.cache_clear()
        assert library.load_kernels() is None
        [made] = (tmp_path / "kernels").glob("*.so")
        return made

    try:
        place = compiled()
        place.write_text("damaged")
        assert compiled().read_text() == "no library\n", "a library that cannot be loaded must be rebuilt"
        place.unlink()
        disk = FakeDisk(monkeypatch, renamed=place)
        assert compiled() == place
    finally:
        library.load_kernels.cache_clear()
    assert [(path.name, is_there) for path, is_there in disk.synced] == [(place.name, False), ("kernels", True)]


def test_kernels_are_for_bf16_on_a_cpu() -> None:
    assert open_kernels(dtype=torch.float32, device=CPU) is None
    assert open_kernels(dtype=torch.bfloat16, device=torch.device("cuda", 0)) is None


@pytest.mark.parametrize(
    "kind",
    [
        *("float32 raw", "bfloat16 raw", "fp8_e4m3 raw", "int8 raw"),
        *("bfloat16 fp8_e4m3", "bfloat16 int8", "bfloat16 int4"),
    ],
)
@pytest.mark.parametrize("dim", [64, 40])
def test_payloads_equal_torch(kernels: Kernels, kind: str, dim: int) -> None:
    """Bit-identical for any heads, and slots in any order."""
    num_tokens, num_heads, (pool_dtype, wire) = 29, 3, kind.split()
    slots, others = torch.cat([torch.arange(11, 32), torch.randperm(8) + 64]), torch.randperm(80)[:num_tokens]
    numbers = torch.randn(10, 2, num_heads + 2, BLOCK_SIZE, dim) * torch.tensor([1e-3, 1.0, 300.0]).repeat(dim)[:dim]
    numbers[0, 0, 1] = 0.0
    pool = numbers.to(DTYPES[pool_dtype])

    def payload() -> tuple[Tensor, Tensor | None]:
        row_dim = dim // 2 if wire == "int4" else dim
        codes = torch.zeros(num_tokens, 2, num_heads, row_dim, dtype=DTYPES.get(wire, pool.dtype))
        return codes, None if wire == "raw" else torch.zeros(codes.shape[:-1], dtype=SCALES[codes.dtype])

    ours, expected = payload(), payload()
    kernels.pack_wire(wire_of(pool, slots, slice(1, 1 + num_heads), *ours))
    reference_pack_kv(pool, slots, slice(1, 1 + num_heads), *expected)
    assert torch.equal(as_bytes(ours[0]), as_bytes(expected[0])) and as_bytes(ours[0]).any()
    assert expected[1] is None or (ours[1] is not None and torch.equal(ours[1], expected[1]))
    targets = [torch.zeros(10, 2, num_heads, BLOCK_SIZE, dim).to(pool.dtype) for _ in range(2)]
    kernels.unpack_wire(wire_of(targets[0], others, slice(0, num_heads), *expected))
    reference_unpack_kv(*expected, targets[1], others, slice(0, num_heads))
    assert torch.equal(as_bytes(targets[0]), as_bytes(targets[1])) and as_bytes(targets[0]).any()


def test_int8_ties_round_to_even(kernels: Kernels) -> None:
    """Covers every bf16 midpoint between two int8 codes, its neighbours, and NaN, in rows with scale 1."""
    values = torch.arange(-254.0, 255).div(2).bfloat16()
    values = torch.cat([values, torch.tensor([127.0] * (-len(values) % 15))]).float()
    values = torch.cat([values, *(values * (1 + sign * 2.0**-7) for sign in (-1, 1))]).clamp(-127, 127)
    rows = torch.cat([values.view(-1, 15), torch.full((len(values) // 15, 1), 127.0)], dim=1).bfloat16()
    rows[-1, 4] = torch.nan
    pool = torch.stack([rows, rows]).view(1, 2, 1, *rows.shape)
    got = torch.zeros(len(rows), 2, 1, 16, dtype=torch.int8), torch.zeros(len(rows), 2, 1).bfloat16()
    kernels.pack_wire(wire_of(pool, torch.arange(len(rows)), slice(0, 1), *got))
    assert torch.equal(got[0][:-1, 1, 0].float(), rows[:-1].float().round())
    assert (got[1][:-1] == 1).all() and got[1][-1].isnan().all()


def test_every_e4m3_code_equals_torch(kernels: Kernels) -> None:
    """Covers all e4m3 numbers, their midpoints, and neighbours of these, as bf16 in rows with scale 1."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = torch.cat([codes, (codes[1:] + codes[:-1]) / 2]).bfloat16()
    values = torch.cat([values * (1 + nudge) for nudge in (-(2.0**-8), 0, 2.0**-7)]).clamp(max=448)
    values = torch.cat([values, -values, torch.full((-2 * len(values) % 15,), 448.0, dtype=torch.bfloat16)])
    rows = torch.cat([values.view(-1, 15), torch.full((len(values) // 15, 1), 448.0)], dim=1).bfloat16()
    pool = torch.stack([rows, rows]).view(1, 2, 1, *rows.shape)
    slots = torch.arange(len(rows))
    got = torch.zeros(len(rows), 2, 1, 16, dtype=torch.float8_e4m3fn), torch.zeros(len(rows), 2, 1).bfloat16()
    kernels.pack_wire(wire_of(pool, slots, slice(0, 1), *got))
    assert torch.equal(as_bytes(got[0][:, 0, 0]), as_bytes(rows.float().to(torch.float8_e4m3fn)))


@pytest.mark.parametrize("num_words", [0, 1, 8, 1001])
def test_checksum_equals_torch(kernels: Kernels, num_words: int) -> None:
    words = torch.randint(-(2**62), 2**62, (num_words,))
    assert sum_words(kernels, words.view(torch.uint8)) == int((words * (torch.arange(num_words) * 2 + 1)).sum()) % 2**64
