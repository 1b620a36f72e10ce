"""Autotuning of CPU kernels and torch: measured once per machine; results do not depend on the choice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.attention.cpu_heads import CompiledHeads, SharedHeads, num_long_rows
from engine.attention.layer_attention import LayerAttention
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.cpu.autotune import KERNELS, TILES, TORCH, MeasuredWays, Ways
from engine.cpu.library import Kernels
from engine.kernels.gated_mul import SILU, GatedActivation
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from engine.layers.layers import RMSNorm
from engine.layers.packed_matrix import NEVER, PackedMatrix
from tests.engine.steps import random_bf16 as random
from tests.engine.tiny_models import MakeModel, MakeRunner

# T tokens, I input features, O output features, N heads of queries, keys and values, D head_dim, F = D / 2

CPU = torch.device("cpu")


class Clock:
    """Clock that only advances by the stated duration of work."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def read(self) -> float:
        return self.now

    def work(self, name: str, seconds: float) -> Callable[[], None]:
        def compute() -> None:
            self.calls.append(name)
            self.now += seconds

        return compute


class TorchWins(MeasuredWays):
    def quickest(self, workload: str, ways: Ways) -> str:
        for compute in ways.values():
            # Every alternative must be computable.
            compute()
        return TORCH


def test_measurement_is_shared_by_all_processes(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "kernels" / "ways.json"
    ways = {KERNELS: clock.work(KERNELS, 1.4), TORCH: clock.work(TORCH, 1.0)}
    assert MeasuredWays(path, clock.read).quickest("a product", ways) == TORCH
    num_calls = len(clock.calls)
    assert clock.calls[:4] == [KERNELS, TORCH] * 2, "alternatives must alternate"
    another = MeasuredWays(path, clock.read)
    assert another.quickest("a product", ways) == TORCH and len(clock.calls) == num_calls
    [row] = another.table()
    assert row == {"what": "a product", "ms": {KERNELS: 1400.0, TORCH: 1000.0}, "taken": TORCH}


@pytest.mark.parametrize("kernels_s", [1.2, 1.0, 0.5])
def test_torch_must_win_by_more_than_noise(tmp_path: Path, kernels_s: float) -> None:
    clock = Clock()
    ways = {KERNELS: clock.work(KERNELS, kernels_s), TORCH: clock.work(TORCH, 1.0)}
    assert MeasuredWays(tmp_path / "ways.json", clock.read).quickest("a product", ways) == KERNELS


def test_lost_measurement_is_repeated_before_it_is_saved(tmp_path: Path) -> None:
    clock = Clock()

    def disturbed() -> None:
        clock.work(KERNELS, 2.0 if clock.calls.count(KERNELS) < 6 else 1.1)()

    ways = {KERNELS: disturbed, TORCH: clock.work(TORCH, 1.0)}
    measured = MeasuredWays(tmp_path / "ways.json", clock.read)
    assert measured.quickest("a product", ways) == KERNELS
    assert measured.table()[0]["ms"][KERNELS] == pytest.approx(1100.0)


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"a product": 3}', '{"a product": {"kernels": 1}}', '{"a product": {']
    + [f'{{"a product": {{"kernels": {took}, "torch": 2}}}}' for took in ("NaN", "-Infinity", "0", "1" + "0" * 400)]
    + ["[" * 100_000],
    ids=range(10),
)
def test_malformed_file_is_measured_again(tmp_path: Path, text: str) -> None:
    clock, path = Clock(), tmp_path / "ways.json"
    path.write_text(text)
    ways = {KERNELS: clock.work(KERNELS, 2.0), TORCH: clock.work(TORCH, 1.0)}
    assert MeasuredWays(path, clock.read).quickest("a product", ways) == TORCH and clock.calls
    assert MeasuredWays(path, clock.read).quickest("a product", dict.fromkeys(ways, pytest.fail)) == TORCH


def test_read_only_file_is_used_and_unwritable_results_are_not_saved(tmp_path: Path) -> None:
    """Covers a container image that contains the kernels and is read-only."""
    clock, path = Clock(), tmp_path / "kernels" / "ways.json"
    ways = {KERNELS: clock.work(KERNELS, 2.0), TORCH: clock.work(TORCH, 1.0)}
    assert MeasuredWays(path, clock.read).quickest("a product", ways) == TORCH
    path.with_suffix(".lock").unlink()
    path.with_suffix(".lock").mkdir()
    assert MeasuredWays(path, clock.read).quickest("a product", dict.fromkeys(ways, pytest.fail)) == TORCH
    nowhere, num_calls = path / "ways.json", len(clock.calls)
    assert MeasuredWays(nowhere, clock.read).quickest("a product", ways) == TORCH and len(clock.calls) > num_calls


def test_new_alternative_is_measured(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "ways.json"
    ways = {KERNELS: clock.work(KERNELS, 2.0), TORCH: clock.work(TORCH, 1.0)}
    assert MeasuredWays(path, clock.read).quickest("a product", ways) == TORCH
    more = ways | {TILES: clock.work(TILES, 0.5)}
    assert MeasuredWays(path, clock.read).quickest("a product", more) == TILES
    assert MeasuredWays(path, clock.read).quickest("a product", ways) == TORCH, "AMX was not among the alternatives"


def test_matrix_measures_from_many_rows_down(kernels: Kernels, tmp_path: Path) -> None:
    requested: list[str] = []

    class FromRows128(MeasuredWays):
        def quickest(self, workload: str, ways: Ways) -> str:
            requested.append(workload)
            return KERNELS if "64 rows" in workload else TORCH

    matrix = PackedMatrix.bf16(kernels, random(512, 512))
    matrix.measure(FromRows128(tmp_path))
    assert matrix.torch_rows == 128
    assert requested == [f"MULTIPLY_BF16 512 x 512, {rows} rows" for rows in (2048, 512, 128, 64)]
    small = PackedMatrix.bf16(kernels, random(64, 64))
    small.measure(TorchWins(tmp_path))
    assert small.torch_rows == NEVER


@pytest.mark.parametrize("before", [None, RMSNorm(random(515, seed=3), 1e-5), SILU], ids=["", "norm", "gated"])
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_torch_product_equals_kernel_product(
    kernels: Kernels, tmp_path: Path, kind: str, before: RMSNorm | GatedActivation | None
) -> None:
    # Sizes that fill neither panels nor groups; the outputs are dequantized in several chunks.
    weight_OI = random(5003, 515) / 515**0.5
    matrix = getattr(PackedMatrix, kind)(kernels, weight_OI)
    x_TI = random(40, 1030 if isinstance(before, GatedActivation) else 515, seed=1)
    extras = {"bias_O": random(5003, seed=4), "before": before, "residual_TO": random(40, 5003, seed=5)}
    ours = matrix.multiply(x_TI, **extras)
    matrix.measure(TorchWins(tmp_path))
    assert matrix.torch_rows == 32 < len(x_TI)
    theirs = matrix.multiply(x_TI, **extras)
    # In bf16 both may sum in the same order.
    if kind == "int8":
        assert not torch.equal(ours, theirs), "torch did not compute the product"
    error = float((theirs.float() - ours.float()).abs().mean() / ours.float().abs().mean())
    assert error < (0.002 if kind == "bf16" else 0.02)


@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_only_long_trailing_rows_go_to_torch(kernels: Kernels, dtype: str, window: int | None) -> None:
    layout = KVLayout(model="m", num_layers=1, num_kv_heads=2, head_dim=64, block_size=8, dtype=dtype)
    pool = KVPool(layout, num_blocks=90, device=CPU)
    blocks = iter(range(90))
    # Only the last two are long and at the end.
    spans = [(3, 1), (30, 1), (0, 70), (16, 4), (0, 64), (100, 65)]
    rows = [Row([0] * n, start, [next(blocks) for _ in range(-(-(start + n) // 8))], 1) for start, n in spans]
    batch = Batch.of(rows, block_size=8)
    assert num_long_rows(batch) == 2
    pool.write(0, torch.arange(720), random(720, 2, 64, seed=1), random(720, 2, 64, seed=2))
    angles = torch.ones(batch.num_tokens, 1, 32)
    q_THD = random(batch.num_tokens, 6, 64, seed=3)
    attention = LayerAttention(layer=0, scale=64**-0.5, window=window)
    ours = CompiledHeads(kernels, batch, pool, [(angles, angles)]).attend(attention, q_THD)
    theirs = SharedHeads(kernels, batch, pool, [(angles, angles)]).attend(attention, q_THD)
    num_short = 76
    assert torch.equal(ours[:num_short], theirs[:num_short])
    torch.testing.assert_close(theirs, ours, atol=0.02, rtol=0.02)


def test_logits_do_not_depend_on_the_chosen_backend(
    tiny_model: MakeModel, make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Runs a prompt beside a decoding sequence, with torch always faster and never faster."""
    directory, _ = tiny_model("llama", hidden_size=256, intermediate_size=768, initializer_range=0.06)

    def logits(**config: bool) -> torch.Tensor:
        rows = [Row([7], 0, [0], 1), Row(range(3, 83), 0, range(1, 12), 1)]
        runner = make_runner(directory, dtype="bfloat16", **config)
        return runner.forward(Batch.of(rows, block_size=8)).clone()

    ours = logits(deterministic=True)
    monkeypatch.setattr(MeasuredWays, "of_this_machine", classmethod(lambda cls, version: TorchWins(tmp_path)))
    theirs = logits()
    assert not torch.equal(ours, theirs), "torch was not used"
    torch.testing.assert_close(theirs, ours, atol=0.1, rtol=0.05)
    assert torch.equal(logits(deterministic=True), ours), "deterministic mode must use one order"
