"""Products by AMX give what products without it give: here by its instructions as Intel's manual describes them, for
hardly any machine that runs this has them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from core.model.source import cache_root
from engine.attention.cpu_heads import CompiledHeads, quickest_way
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.cpu import library
from engine.cpu.autotune import KERNELS, TILES, TORCH, MeasuredWays, Ways
from engine.cpu.library import Kernels, Program
from engine.cpu.structs import Step
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from engine.layers.layers import Before, GatedSiLU, RMSNorm
from engine.layers.packed_matrix import NEVER, PackedMatrix
from tests.engine.cpu.coded_weights import FORMATS, random_weight

# T tokens, I input features, O output features

_EMULATED = Path(__file__).parent / "emulated_tiles.h"
# The system says no to whoever has a stack for signals that tiles would not fit.
_WITHOUT_PERMISSION = """
import ctypes
from pathlib import Path
import sys
import torch
from engine.cpu.library import Kernels
from engine.layers.packed_matrix import PackedMatrix

memory = ctypes.create_string_buffer(4096)
stack = (ctypes.c_uint64 * 3)(ctypes.addressof(memory), 0, len(memory))
assert ctypes.CDLL(None).sigaltstack(stack, None) == 0
kernels = Kernels(Path(sys.argv[1]))
assert not kernels.has_tiles
matrix = PackedMatrix.bf16(kernels, torch.ones(64, 64))
matrix.fix()
assert matrix.multiply(torch.ones(40, 64, dtype=torch.bfloat16)).eq(64).all()
"""


class TilesWin(MeasuredWays):
    """And torch is next."""

    def quickest(self, what: str, ways: Ways) -> str:
        return TILES if TILES in ways else TORCH


class Emulated(Kernels):
    """These sources over the emulated instructions."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._num_released = ctypes.c_int32.in_dll(ctypes.CDLL(str(path)), "num_released")

    def have_been_used(self) -> bool:
        """Since somebody last asked."""
        was_used, self._num_released.value = self._num_released.value > 0, 0
        return was_used


@pytest.fixture(scope="module")
def tiled_kernels(kernels: Kernels, tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    compiler = shutil.which("c++")
    assert compiler is not None, "whoever has compiled the kernels has one"
    source, built = Path(library.__file__).parent / "kernels.cpp", tmp_path_factory.mktemp("tiles") / "kernels.so"
    command = [compiler, *library.FLAGS, "-O1", "-include", str(_EMULATED), str(source), "-o", str(built)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    emulated = Emulated(built)
    if not emulated.has_tiles:
        pytest.skip("rows are not kept in bf16 on this processor, as tiles want them")
    return emulated


@pytest.fixture(autouse=True)
def nobody_has_used_them(tiled_kernels: Emulated) -> None:
    tiled_kernels.have_been_used()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(
    "before", [None, RMSNorm(random(576, seed=3), 1e-5), GatedSiLU()], ids=["plain", "norm", "gated"]
)
@pytest.mark.parametrize("num_rows", [0, 1, 15, 16, 17, 32, 33, 47, 95, 97, 130, 700])
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_products_agree(
    tiled_kernels: Emulated, tmp_path: Path, kind: str, num_rows: int, before: Before | None
) -> None:
    """Panels and rows that fill no pair of tiles, with everything that happens before and after."""
    weight_OI = random(24 * 16 * 2 + 40, 576) / 24
    x_TI = random(num_rows, 1152 if isinstance(before, GatedSiLU) else 576, seed=1)
    extras = {"bias_O": random(len(weight_OI), seed=4), "residual_TO": random(num_rows, len(weight_OI), seed=5)}
    matrix = getattr(PackedMatrix, kind)(tiled_kernels, weight_OI)
    ours = matrix.multiply(x_TI, before=before, **extras)
    assert not tiled_kernels.have_been_used()
    matrix.tile_rows = num_rows
    theirs = matrix.multiply(x_TI, before=before, **extras)
    assert tiled_kernels.have_been_used() == (num_rows > 0)
    if kind == "int8":
        assert torch.equal(theirs, ours), "whole numbers"
    else:
        torch.testing.assert_close(theirs, ours, atol=0.03, rtol=0.01)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_outputs_as_floats_are_the_same_numbers(tiled_kernels: Emulated, kind: str) -> None:
    """As logits are."""
    x_TI = random(33, 576, seed=1)
    matrix = getattr(PackedMatrix, kind)(tiled_kernels, random(1000, 576) / 24)
    matrix.tile_rows = len(x_TI)
    narrow_TO = matrix.multiply(x_TI)
    assert tiled_kernels.have_been_used()
    wide_TO = torch.full((len(x_TI), 1000), torch.nan)
    calls = matrix.calls(x_TI, wide_TO, bias_O=None, before=None, residual_TO=None)
    Program(tiled_kernels, list(calls)).run(Step(tokens=len(x_TI)))
    assert tiled_kernels.have_been_used()
    assert torch.equal(wide_TO, narrow_TO.float())


def test_inputs_that_fill_no_tile_go_without(tiled_kernels: Emulated) -> None:
    matrix = PackedMatrix.bf16(tiled_kernels, random(64, 48))
    ours = matrix.multiply(random(40, 48, seed=1))
    matrix.tile_rows = 0
    assert torch.equal(matrix.multiply(random(40, 48, seed=1)), ours)
    assert not tiled_kernels.have_been_used()


def test_they_are_used_where_they_are_quicker(tiled_kernels: Emulated, tmp_path: Path) -> None:
    matrix = PackedMatrix.bf16(tiled_kernels, random(512, 512))
    matrix.measure(TilesWin(tmp_path))
    assert matrix.tile_rows == 0 and matrix.torch_rows == NEVER


@pytest.mark.parametrize(("loses_at", "tile_rows"), [("32 rows", 128), ("128 rows", 512), ("2048 rows", NEVER)])
def test_they_are_used_from_so_many_rows_on(
    tiled_kernels: Emulated, tmp_path: Path, loses_at: str, tile_rows: int
) -> None:
    class TilesLose(MeasuredWays):
        def quickest(self, what: str, ways: Ways) -> str:
            return KERNELS if what.endswith(f" {loses_at}") else TILES

    matrix = PackedMatrix.bf16(tiled_kernels, random(512, 512))
    matrix.measure(TilesLose(tmp_path))
    assert matrix.tile_rows == tile_rows


def test_one_order_is_theirs_for_any_number_of_rows(tiled_kernels: Emulated) -> None:
    """As a deterministic deployment wants it: a row's bits do not depend on the rows beside it."""
    matrix, x_TI = PackedMatrix.bf16(tiled_kernels, random(200, 576) / 24), random(70, 576, seed=1)
    matrix.fix()
    whole = matrix.multiply(x_TI)
    assert tiled_kernels.have_been_used()
    for first, end in ((0, 1), (1, 9), (9, 40), (40, 56), (56, 70)):
        assert torch.equal(matrix.multiply(x_TI[first:end]), whole[first:end])


def test_one_order_of_few_bits_is_that_without_them(tiled_kernels: Emulated) -> None:
    coded = PackedMatrix.few_bits(tiled_kernels, [random_weight("Q4_0", 88, 768)])
    assert coded is not None
    coded.fix()
    x_TI = random(40, 768, seed=1)
    assert torch.equal(coded.multiply(x_TI)[:1], coded.multiply(x_TI[:1]))


def test_they_are_not_used_where_they_are_wrong(
    tiled_kernels: Emulated, kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = PackedMatrix.multiply

    def one_is_wrong(matrix: PackedMatrix, x_TI: torch.Tensor) -> torch.Tensor:
        out_TO = right(matrix, x_TI)
        if matrix.tile_rows == 0:
            out_TO[-1, -1] += out_TO.abs().max()
        return out_TO

    monkeypatch.setattr(PackedMatrix, "multiply", one_is_wrong)
    matrix = PackedMatrix.bf16(tiled_kernels, random(512, 512))
    matrix.measure(TilesWin(tmp_path))
    assert matrix.tile_rows == NEVER and matrix.torch_rows == 32, "the quickest of the others is taken"


def test_they_are_not_used_where_the_system_does_not_let_us(kernels: Kernels) -> None:
    if not kernels.has_tiles:
        pytest.skip("no such units here")
    path = cache_root() / "kernels" / f"{kernels.version}.so"
    subprocess.run([sys.executable, "-c", _WITHOUT_PERMISSION, str(path)], check=True, timeout=100)


@pytest.mark.parametrize("num_rows", [1, 40, 700])
@pytest.mark.parametrize("name", FORMATS)
def test_few_bits_are_multiplied_as_the_numbers_that_they_are(
    tiled_kernels: Emulated, name: str | int, num_rows: int
) -> None:
    """In bf16, rows too: bit by bit what a matrix of those numbers gives."""
    coded = PackedMatrix.few_bits(tiled_kernels, [random_weight(name, 88, 768)])
    assert coded is not None
    plain = PackedMatrix.bf16(tiled_kernels, coded.rows(torch.arange(88)))
    coded.tile_rows = plain.tile_rows = 0
    x_TI, extras = random(num_rows, 768, seed=1), {"bias_O": random(88), "residual_TO": random(num_rows, 88, seed=5)}
    got = coded.multiply(x_TI, before=None, **extras)
    assert tiled_kernels.have_been_used()
    assert torch.equal(got, plain.multiply(x_TI, before=None, **extras)) and got.float().std() > 0


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("head_dim", [12, 64, 80])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3", "int8"])
def test_attention_agrees(tiled_kernels: Emulated, dtype: str, head_dim: int, window: int | None) -> None:
    """Prompts that fill whole tiles and that do not, over a pool in which every slot holds something; a few
    queries, as a draft's are, get the same bits as without."""
    spans = [(140, 1), (30, 9), (0, 150), (101, 79), (0, 80), (255, 90), (0, 5)]
    layout = KVLayout(model="m", num_layers=1, num_kv_heads=2, head_dim=head_dim, block_size=8, dtype=dtype)
    blocks = iter(np.random.default_rng(0).permutation(150).tolist())
    rows = [Row([0] * n, start, [next(blocks) for _ in range(-(-(start + n) // 8))], 1) for start, n in spans]
    batch, pool = Batch.of(rows, block_size=8), KVPool(layout, num_blocks=150, device=torch.device("cpu"))
    pool.write(0, torch.arange(1200), random(1200, 2, head_dim, seed=1), random(1200, 2, head_dim, seed=2))
    angles, q_THD = torch.ones(batch.num_tokens, 1, head_dim // 2), random(batch.num_tokens, 6, head_dim, seed=3)
    without = CompiledHeads(tiled_kernels, batch, pool, angles, angles).attend(0, q_THD, window=window)
    assert not tiled_kernels.have_been_used()
    heads = CompiledHeads(tiled_kernels, batch, pool, angles, angles, by_tiles=True)
    got = heads.attend(0, q_THD, window=window)
    assert tiled_kernels.have_been_used()
    torch.testing.assert_close(got, without, atol=0.02, rtol=0.02)
    assert float((got.float() - without.float()).abs().mean() / without.float().abs().mean()) < 4e-3
    first = 0
    for _, count in spans:
        if count < 80:
            assert torch.equal(got[first : first + count], without[first : first + count])
        first += count


@pytest.mark.parametrize("whose", ["tiled_kernels", "kernels"])
@pytest.mark.parametrize(
    "steps",
    [(0, 20), (20, 0), (0, 1, 0, 5, 5.5, 2), pytest.param((0,) * 750 + (5,) * 750, id="at once")],
)
def test_scores_may_grow_or_fall_by_any_amount(
    request: pytest.FixtureRequest, whose: str, steps: tuple[float, ...]
) -> None:
    """From key to key, past what floats hold: a weight is looked for anew where it would be. Also by this processor's
    own units, where it has some: their powers of two are others."""
    some: Kernels = request.getfixturevalue(whose)
    if not some.has_tiles:
        pytest.skip("no such units here")
    num_keys, num_queries = 1500, 90
    layout = KVLayout(model="m", num_layers=1, num_kv_heads=1, head_dim=64, block_size=8, dtype="bfloat16")
    pool = KVPool(layout, num_blocks=188, device=torch.device("cpu"))
    sizes = np.interp(np.linspace(0, 1, num_keys), np.linspace(0, 1, len(steps)), steps)
    keys = torch.from_numpy(sizes).view(-1, 1, 1).expand(-1, 1, 64).bfloat16().contiguous()
    values = random(num_keys, 1, 64, seed=2)
    pool.write(0, torch.arange(num_keys), keys, values)
    row = Row([0] * num_queries, num_keys - num_queries, range(188), 1)
    batch, angles = Batch.of([row], block_size=8), torch.ones(num_queries, 1, 32)
    q_THD = torch.full((num_queries, 2, 64), 4.0, dtype=torch.bfloat16)
    got = CompiledHeads(some, batch, pool, angles, angles, by_tiles=True).attend(0, q_THD, window=None)
    assert not isinstance(some, Emulated) or some.have_been_used()
    scores = q_THD[0, 0].double() @ keys[:, 0].double().T / 8
    for query in range(num_queries):
        seen = num_keys - num_queries + query + 1
        wanted = scores[:seen].softmax(0) @ values[:seen, 0].double()
        torch.testing.assert_close(got[query, 0].double(), wanted, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("num_heads", [1, 8, 16, 33])
def test_any_group_of_heads_attends_by_them(tiled_kernels: Emulated, num_heads: int) -> None:
    """Pieces of a prompt have fewer queries where more heads share a key."""
    layout = KVLayout(model="m", num_layers=1, num_kv_heads=1, head_dim=64, block_size=8, dtype="bfloat16")
    pool = KVPool(layout, num_blocks=25, device=torch.device("cpu"))
    pool.write(0, torch.arange(200), random(200, 1, 64, seed=1), random(200, 1, 64, seed=2))
    batch, angles = Batch.of([Row([0] * 200, 0, range(25), 1)], block_size=8), torch.ones(200, 1, 32)
    q_THD = random(200, num_heads, 64, seed=3)
    without = CompiledHeads(tiled_kernels, batch, pool, angles, angles).attend(0, q_THD, window=None)
    got = CompiledHeads(tiled_kernels, batch, pool, angles, angles, by_tiles=True).attend(0, q_THD, window=None)
    assert tiled_kernels.have_been_used()
    torch.testing.assert_close(got, without, atol=0.02, rtol=0.02)


def test_they_attend_where_they_are_quicker(tiled_kernels: Emulated, tmp_path: Path) -> None:
    layout = KVLayout(model="m", num_layers=1, num_kv_heads=2, head_dim=64, block_size=8, dtype="bfloat16")
    assert quickest_way(tiled_kernels, layout, 6, TilesWin(tmp_path)) == TILES
