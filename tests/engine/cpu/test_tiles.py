"""AMX products equal those without AMX.

Hardly any test machine has AMX, so its instructions are emulated as described in Intel's manual.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.model.source import cache_root
from engine.attention.cpu_heads import CompiledHeads, quickest_way
from engine.attention.layer_attention import LayerAttention
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.cpu import library
from engine.cpu.autotune import KERNELS, TILES, TORCH, MeasuredWays, Ways
from engine.cpu.library import Kernels, Program
from engine.cpu.structs import Step
from engine.kernels.gated_mul import SILU, GatedActivation
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from engine.layers.layers import Before, RMSNorm
from engine.layers.packed_matrix import NEVER, PackedMatrix
from tests.engine.cpu.test_few_bits import FORMATS, random_weight
from tests.engine.steps import random_bf16 as random
from tests.support.grids import quick

# T tokens, I input features, O output features

_EMULATED = Path(__file__).parent / "emulated_tiles.h"
# The system denies AMX to a process whose signal stack is too small for the tiles.
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
    """Measurements in which AMX is fastest and torch second."""

    def quickest(self, workload: str, ways: Ways) -> str:
        return TILES if TILES in ways else TORCH


class Emulated(Kernels):
    """Kernels built from the same sources over emulated instructions."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._num_released = ctypes.c_int32.in_dll(ctypes.CDLL(str(path)), "num_released")

    def have_been_used(self) -> bool:
        """Return True if AMX was used since the last call."""
        was_used, self._num_released.value = self._num_released.value > 0, 0
        return was_used


@pytest.fixture(scope="module")
def tiled_kernels(kernels: Kernels) -> Emulated:
    """Compiling takes 16 s. The build is cached beside the kernels, whose version identifies compiler and processor."""
    compiler = shutil.which("c++")
    assert compiler is not None, "the kernels fixture needs a compiler"
    directory = Path(library.__file__).parent
    sources = [_EMULATED, *sorted(directory.glob("*.h")), directory / "kernels.cpp"]
    key = blake2b(kernels.version.encode() + b"".join(path.read_bytes() for path in sources), digest_size=8).hexdigest()
    built = cache_root() / "kernels" / f"{key}-tiles.so"
    built.parent.mkdir(parents=True, exist_ok=True)
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=built.parent) as place:
            command = [compiler, *library.FLAGS, "-O1", "-include", str(_EMULATED), str(sources[-1])]
            subprocess.run([*command, "-o", f"{place}/a.so"], check=True, capture_output=True, timeout=300)
            Path(place, "a.so").replace(built)
    emulated = Emulated(built)
    if not emulated.has_tiles:
        pytest.skip("this processor does not keep rows in bf16, which tiles need")
    return emulated


@pytest.fixture(autouse=True)
def reset_usage(tiled_kernels: Emulated) -> None:
    tiled_kernels.have_been_used()


@pytest.mark.parametrize("before", [None, RMSNorm(random(576, seed=3), 1e-5), SILU], ids=["plain", "norm", "gated"])
@pytest.mark.parametrize("num_rows", quick([0, 1, 15, 16, 17, 32, 33, 47, 95, 97, 130, 700], (0, 1, 16, 33, 97)))
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_amx_products_equal_plain_products(
    tiled_kernels: Emulated, tmp_path: Path, kind: str, num_rows: int, before: Before | None
) -> None:
    """Covers panels and rows that do not fill pairs of tiles, with all fused operations."""
    weight_OI = random(24 * 16 * 2 + 40, 576) / 24
    x_TI = random(num_rows, 1152 if isinstance(before, GatedActivation) else 576, seed=1)
    extras = {"bias_O": random(len(weight_OI), seed=4), "residual_TO": random(num_rows, len(weight_OI), seed=5)}
    matrix = getattr(PackedMatrix, kind)(tiled_kernels, weight_OI)
    ours = matrix.multiply(x_TI, before=before, **extras)
    assert not tiled_kernels.have_been_used()
    matrix.tile_rows = num_rows
    theirs = matrix.multiply(x_TI, before=before, **extras)
    assert tiled_kernels.have_been_used() == (num_rows > 0)
    if kind == "int8":
        assert torch.equal(theirs, ours), "integer products must be exact"
    else:
        torch.testing.assert_close(theirs, ours, atol=0.03, rtol=0.01)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_fp32_outputs_have_the_same_values(tiled_kernels: Emulated, kind: str) -> None:
    """Logits use fp32 outputs."""
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


def test_inputs_below_one_tile_do_not_use_amx(tiled_kernels: Emulated) -> None:
    matrix = PackedMatrix.bf16(tiled_kernels, random(64, 48))
    ours = matrix.multiply(random(40, 48, seed=1))
    matrix.tile_rows = 0
    assert torch.equal(matrix.multiply(random(40, 48, seed=1)), ours)
    assert not tiled_kernels.have_been_used()


def test_amx_is_used_if_faster(tiled_kernels: Emulated, tmp_path: Path) -> None:
    matrix = PackedMatrix.bf16(tiled_kernels, random(512, 512))
    matrix.measure(TilesWin(tmp_path))
    assert matrix.tile_rows == 0 and matrix.torch_rows == NEVER


@pytest.mark.parametrize(("loses_at", "tile_rows"), [("32 rows", 64), ("128 rows", 512), ("2048 rows", NEVER)])
def test_amx_is_used_from_the_measured_row_count(
    tiled_kernels: Emulated, tmp_path: Path, loses_at: str, tile_rows: int
) -> None:
    class TilesLose(MeasuredWays):
        def quickest(self, workload: str, ways: Ways) -> str:
            return KERNELS if workload.endswith(f" {loses_at}") else TILES

    matrix = PackedMatrix.bf16(tiled_kernels, random(512, 512))
    matrix.measure(TilesLose(tmp_path))
    assert matrix.tile_rows == tile_rows


def test_deterministic_bf16_uses_the_amx_order_for_any_rows(tiled_kernels: Emulated) -> None:
    """Deterministic deployments: a row's bits do not depend on the other rows."""
    matrix, x_TI = PackedMatrix.bf16(tiled_kernels, random(200, 576) / 24), random(70, 576, seed=1)
    matrix.fix()
    whole = matrix.multiply(x_TI)
    assert tiled_kernels.have_been_used()
    for first, end in ((0, 1), (1, 9), (9, 40), (40, 56), (56, 70)):
        assert torch.equal(matrix.multiply(x_TI[first:end]), whole[first:end])


def test_deterministic_low_bit_products_do_not_use_amx(tiled_kernels: Emulated) -> None:
    coded = PackedMatrix.few_bits(tiled_kernels, [random_weight("Q4_0", 88, 768)])
    assert coded is not None
    coded.fix()
    x_TI = random(40, 768, seed=1)
    assert torch.equal(coded.multiply(x_TI)[:1], coded.multiply(x_TI[:1]))


def test_drafts_do_not_make_low_bit_products_use_amx(tiled_kernels: Emulated) -> None:
    """Otherwise a draft would change the order of sums, and with it an answer."""
    drafted = Row([1] * 5, 10, [0, 1, 2], num_logits=5)
    batch = Batch.of([drafted, drafted, Row([1] * 6, 0, [3], num_logits=1)], block_size=8)
    assert (batch.num_tokens, batch.num_drafted) == (16, 8)
    coded = PackedMatrix.few_bits(tiled_kernels, [random_weight("Q4_0", 88, 768)])
    assert coded is not None
    x_TI = random(batch.num_tokens, 768, seed=1)
    expected_TO, coded.tile_rows = coded.multiply(x_TI), 9
    out_TO = torch.empty_like(expected_TO)
    program = Program(tiled_kernels, list(coded.calls(x_TI, out_TO, bias_O=None, before=None, residual_TO=None)))
    for undrafted, is_tiled in ((batch.num_tokens - batch.num_drafted, False), (9, True)):
        program.run(Step(tokens=batch.num_tokens, undrafted=undrafted))
        assert tiled_kernels.have_been_used() == is_tiled == (not torch.equal(out_TO, expected_TO))


def test_amx_is_disabled_if_its_products_are_wrong(
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
    assert matrix.tile_rows == NEVER and matrix.torch_rows == 32, "the fastest remaining alternative must be chosen"


def test_amx_is_disabled_without_permission(kernels: Kernels) -> None:
    if not kernels.has_tiles:
        pytest.skip("no AMX on this machine")
    path = cache_root() / "kernels" / f"{kernels.version}.so"
    subprocess.run([sys.executable, "-c", _WITHOUT_PERMISSION, str(path)], check=True, timeout=100)


@pytest.mark.parametrize("num_rows", [1, 40, 700])
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "unequal groups"])
def test_low_bit_amx_products_equal_dequantized_bf16(tiled_kernels: Emulated, name: str, num_rows: int) -> None:
    """Rows stay in bf16, so results are bit-identical to a bf16 matrix of the dequantized numbers in the same order."""
    coded = PackedMatrix.few_bits(tiled_kernels, [random_weight(name, 88, 768)])
    assert coded is not None
    plain = PackedMatrix.bf16(tiled_kernels, coded.rows(torch.arange(88)))
    coded.tile_rows = plain.tile_rows = 0
    x_TI, extras = random(num_rows, 768, seed=1), {"bias_O": random(88), "residual_TO": random(num_rows, 88, seed=5)}
    got = coded.multiply(x_TI, before=None, **extras)
    assert tiled_kernels.have_been_used()
    assert torch.equal(got, plain.multiply(x_TI, before=None, **extras)) and got.float().std() > 0


SINKS = random(6, seed=30).float()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "fields"),
    [
        ("bfloat16", 12, {"window": 40}),
        ("bfloat16", 64, {"soft_cap": 1.5, "sinks_H": SINKS}),
        ("bfloat16", 80, {"window": 1}),
        ("bfloat16", 512, {"chunk": 100}),
        ("fp8_e4m3", 12, {"window": 1, "sinks_H": SINKS}),
        ("fp8_e4m3", 64, {"chunk": 7}),
        ("fp8_e4m3", 80, {"window": 40, "soft_cap": 1.5}),
        ("int8", 12, {"soft_cap": 1.5}),
        ("int8", 112, {"chunk": 100, "soft_cap": 1.5, "sinks_H": SINKS + 3}),
        ("int8", 256, {}),
        ("int4", 64, {"window": 260, "soft_cap": 1.5, "sinks_H": SINKS + 3}),
        ("int4", 80, {"chunk": 515}),
    ],
    ids=str,
)
def test_amx_attention_equals_plain_attention(
    tiled_kernels: Emulated, dtype: str, head_dim: int, fields: dict[str, Any]
) -> None:
    """Covers prompts that do and do not fill tiles, over a pool with every slot filled.

    Windows of 260 and chunks of 515 begin between the rows of one tile. A few queries, as of a draft, give the same
    bits as without AMX.
    """
    spans = [(140, 1), (30, 9), (0, 150), (101, 79), (0, 80), (440, 90), (0, 5)]
    layout = KVLayout(model="m", num_layers=1, num_kv_heads=2, head_dim=head_dim, block_size=8, dtype=dtype)
    blocks = iter(np.random.default_rng(0).permutation(150).tolist())
    rows = [Row([0] * n, start, [next(blocks) for _ in range(-(-(start + n) // 8))], 1) for start, n in spans]
    batch, pool = Batch.of(rows, block_size=8), KVPool(layout, num_blocks=150, device=torch.device("cpu"))
    pool.write(0, torch.arange(1200), random(1200, 2, head_dim, seed=1), random(1200, 2, head_dim, seed=2))
    angles, q_THD = torch.ones(batch.num_tokens, 1, head_dim // 2), random(batch.num_tokens, 6, head_dim, seed=3)
    attention = LayerAttention(layer=0, scale=1.5 * head_dim**-0.5, **fields)
    without = CompiledHeads(tiled_kernels, batch, pool, [(angles, angles)]).attend(attention, q_THD)
    assert not tiled_kernels.have_been_used()
    heads = CompiledHeads(tiled_kernels, batch, pool, [(angles, angles)], by_tiles=True)
    got = heads.attend(attention, q_THD)
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
    "steps", [(0, 20), (20, 0), (0, 1, 0, 5, 5.5, 2), pytest.param((0,) * 750 + (5,) * 750, id="at once")]
)
def test_scores_may_change_by_any_amount(request: pytest.FixtureRequest, whose: str, steps: tuple[float, ...]) -> None:
    """Scores change from key to key beyond the range of floats, so that maxima are recomputed.

    Runs on this processor's own AMX too, whose exponentials differ.
    """
    some: Kernels = request.getfixturevalue(whose)
    if not some.has_tiles:
        pytest.skip("no AMX on this machine")
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
    attention = LayerAttention(layer=0, scale=64**-0.5)
    got = CompiledHeads(some, batch, pool, [(angles, angles)], by_tiles=True).attend(attention, q_THD)
    assert not isinstance(some, Emulated) or some.have_been_used()
    scores = q_THD[0, 0].double() @ keys[:, 0].double().T / 8
    for query in range(num_queries):
        seen = num_keys - num_queries + query + 1
        wanted = scores[:seen].softmax(0) @ values[:seen, 0].double()
        torch.testing.assert_close(got[query, 0].double(), wanted, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("num_heads", [1, 8, 16, 33])
def test_amx_attention_with_any_group_size(tiled_kernels: Emulated, num_heads: int) -> None:
    """Pieces of a prompt have fewer queries if more heads share a key."""
    layout = KVLayout(model="m", num_layers=1, num_kv_heads=1, head_dim=64, block_size=8, dtype="bfloat16")
    pool = KVPool(layout, num_blocks=25, device=torch.device("cpu"))
    pool.write(0, torch.arange(200), random(200, 1, 64, seed=1), random(200, 1, 64, seed=2))
    batch, angles = Batch.of([Row([0] * 200, 0, range(25), 1)], block_size=8), torch.ones(200, 1, 32)
    q_THD, attention = random(200, num_heads, 64, seed=3), LayerAttention(layer=0, scale=64**-0.5)
    without = CompiledHeads(tiled_kernels, batch, pool, [(angles, angles)]).attend(attention, q_THD)
    got = CompiledHeads(tiled_kernels, batch, pool, [(angles, angles)], by_tiles=True).attend(attention, q_THD)
    assert tiled_kernels.have_been_used()
    torch.testing.assert_close(got, without, atol=0.02, rtol=0.02)


def test_amx_attention_is_used_if_faster(tiled_kernels: Emulated, tmp_path: Path) -> None:
    layout = KVLayout(model="m", num_layers=1, num_kv_heads=2, head_dim=64, block_size=8, dtype="bfloat16")
    assert quickest_way(tiled_kernels, layout, 6, TilesWin(tmp_path)) == TILES
