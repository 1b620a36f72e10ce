"""Bases of int4 keys and values: exactness, all backends, slices of ranks, and files that must not be mixed."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from core.types.errors import SpecError
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import EngineConfig
from engine.kernels.quant.row_quantization import INT4, dequantize_rows, quantize_rows
from engine.kv.basis import FILE, KVBasis, StoredBases, change_basis, fingerprint_of_bases, open_bases, write_bases
from engine.kv.layout import KVLayout
from engine.quantization.kv_calibration import _basis, _first_basis, _refined, _Seen, bases_of
from engine.runner.runner import ModelRunner
from tests.engine.conftest import MakeRunner
from tests.engine.steps import as_on_gpu, prompts, step
from tests.engine.tiny_models import GEMMA4, GPT_OSS, LFM2, MakeModel, reference_logits
from tests.support.import_graph import ROOT

CPU = torch.device("cpu")
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 9, "attn_logit_softcapping": 5.0},
    "gemma4": GEMMA4,
    "gpt_oss": GPT_OSS,
}


@pytest.fixture
def tiny_model(tiny_model: MakeModel, tmp_path: Path) -> MakeModel:
    """Models in directories of their own: other tests must not find the bases written here."""
    numbers = itertools.count()

    def make(family: str, **changes: Any) -> tuple[Path, PreTrainedModel]:
        directory, reference = tiny_model(family, **changes)
        return Path(shutil.copytree(directory, tmp_path / f"{family}-{next(numbers)}")), reference

    return make


def random_basis(num_heads: int, dim: int) -> Tensor:
    """Return well-conditioned matrices, as stored."""
    return (torch.eye(dim) + 0.3 * torch.randn(num_heads, dim, dim) / dim**0.5).to(torch.bfloat16)


def write_random(directory: Path, config: EngineConfig, *, seed: int = 0) -> None:
    torch.manual_seed(seed)
    layout = config.layout()
    heads = zip(layout.kv_heads, layout.heads, strict=True)
    write_bases(
        directory,
        {
            f"{layer}.{side}": random_basis(count, dim)
            for layer, (count, (_, dim)) in enumerate(heads)
            for side in ("keys", "values")
        },
    )


@pytest.mark.parametrize(("num_q", "num_kv", "dim"), [(1, 1, 16), (6, 2, 20), (4, 4, 64), (9, 3, 80)])
def test_products_and_outputs_stay_the_same(num_q: int, num_kv: int, dim: int) -> None:
    torch.manual_seed(num_q)
    basis = KVBasis.of(random_basis(num_kv, dim), random_basis(num_kv, dim), CPU)
    q, k, v = torch.randn(5, num_q, dim), torch.randn(5, num_kv, dim), torch.randn(5, num_kv, dim)
    stored_q, stored_k, stored_v = basis.of_heads(q, k, v)
    group = num_q // num_kv
    before = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, 1))
    after = torch.einsum("thd,shd->hts", stored_q, stored_k.repeat_interleave(group, 1))
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
    outputs = change_basis(stored_v.repeat_interleave(group, 1), basis.outputs)
    torch.testing.assert_close(outputs, v.repeat_interleave(group, 1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma4", "gpt_oss"])
@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_backends_compute_the_same_in_any_basis(
    dtype: str, most: float, name: str, tiny_model: MakeModel, make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an unquantized pool, so that nothing but the basis may differ.

    fp32 runs in torch, bf16 in the C++ kernels. Soft caps and sinks need true scores; layers of gemma4 share KV.
    """
    directory, _ = tiny_model(name, **CHANGES.get(name, {}))
    (tokens,) = prompts(40)
    plain = step(make_runner(directory, dtype=dtype), [tokens], [(0, 0, 40)])[0]
    write_random(directory, EngineConfig(model_dir=directory, pool_dtype="int4"))

    def open_anyway(model_dir: Path, layout: KVLayout) -> StoredBases | None:
        return open_bases(model_dir, replace(layout, basis=fingerprint_of_bases(model_dir)))

    monkeypatch.setattr("engine.runner.runner.open_bases", open_anyway)
    runner = make_runner(directory, dtype=dtype)
    for start in range(0, 40, 5):
        logits = step(runner, [tokens], [(0, start, start + 5)])[0]
    assert 0 < (logits - plain).norm() < most * plain.norm()


def test_int4_pool_is_the_same_alone_and_in_chunks(tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    directory, model = tiny_model("llama")
    write_random(directory, EngineConfig(model_dir=directory, pool_dtype="int4"))
    (tokens,) = prompts(40)
    config = {"dtype": "bfloat16", "pool_dtype": "int4"}
    whole = step(make_runner(directory, **config), [tokens], [(0, 0, 40)])[0]
    runner = make_runner(directory, **config)
    for start in range(0, 40, 5):
        logits = step(runner, [tokens], [(0, start, start + 5)])[0]
    torch.testing.assert_close(logits, whole, atol=0.02, rtol=0.02)
    exact = reference_logits(model, tokens)[-1]
    assert (whole - exact).abs().mean() < 0.4 * exact.std()


def test_kernel_heads_store_the_codes_of_the_torch_backend(tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    directory, _ = tiny_model("qwen3")
    write_random(directory, EngineConfig(model_dir=directory, pool_dtype="int4"))
    runners = [make_runner(directory, pool_dtype="int4") for _ in range(2)]
    (tokens,) = prompts(24)
    batch = Batch.of([Row(tokens, start=0, blocks=range(3), num_logits=1)], block_size=8)
    logits = [runners[0].forward(batch), as_on_gpu(runners[1], batch)]
    torch.testing.assert_close(logits[0], logits[1], atol=2e-3, rtol=2e-3)
    for ours, theirs in zip(*(runner.pool.codes for runner in runners), strict=True):
        assert (ours != theirs).float().mean() < 1e-3  # sums in another order may cross a rounding boundary


def test_ranks_read_their_own_heads(tiny_model: MakeModel) -> None:
    directory, _ = tiny_model("llama")
    config = EngineConfig(model_dir=directory, pool_dtype="int4")
    write_random(directory, config)
    whole, halves = open_bases(directory, config.layout()), open_bases(directory, config.layout(tensor_parallel=2))
    assert whole and halves
    everything = whole.of(1, rank=0, device=CPU)
    parts = [halves.of(1, rank=rank, device=CPU) for rank in range(2)]
    assert everything
    for index, matrix_KDD in enumerate(everything):
        torch.testing.assert_close(torch.cat([part[index] for part in parts if part]), matrix_KDD)
    assert replace(whole, layout=replace(whole.layout, plain_layers=(1,))).of(1, rank=0, device=CPU) is None


def test_unlike_bases_have_unlike_fingerprints(tiny_model: MakeModel) -> None:
    """A replica or rank without the file, or with another one, must not exchange KV."""
    directory, _ = tiny_model("llama")
    int4, int8 = (EngineConfig(model_dir=directory, pool_dtype=dtype) for dtype in ("int4", "int8"))
    seen, unquantized = {int4.layout().fingerprint}, int8.layout().fingerprint
    for seed in range(2):
        write_random(directory, int4, seed=seed)
        seen.add(int4.layout().fingerprint)
        assert int4.layout(tensor_parallel=2).fingerprint == int4.layout().fingerprint
    assert len(seen) == 3 and int8.layout().fingerprint == unquantized


def test_bases_of_other_weights_are_refused(tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    (directory, _), (other, _) = tiny_model("llama"), tiny_model("llama", vocab_size=320)
    write_random(directory, EngineConfig(model_dir=directory, pool_dtype="int4"))
    (other / FILE).write_bytes((directory / FILE).read_bytes())
    with pytest.raises(SpecError, match="was calibrated for other weights; run `cluster calibrate` again"):
        make_runner(other, pool_dtype="int4")
    (other / FILE).write_bytes(b"x" * 100)
    with pytest.raises(SpecError, match="cannot be read"):
        make_runner(other, pool_dtype="int4")
    assert isinstance(make_runner(other, pool_dtype="int8"), ModelRunner)


def test_damaged_bases_are_refused_by_name(tiny_model: MakeModel) -> None:
    directory, _ = tiny_model("llama")
    config = EngineConfig(model_dir=directory, pool_dtype="int4")
    write_random(directory, config)
    tensors = load_file(directory / FILE)
    keys, no_inverse = tensors.pop("1.keys"), "layer 1 have no finite inverse"
    for damaged, message in [
        ({}, r"1\.keys is missing, not \["),
        ({"1.keys": keys[:, :8].clone()}, r"1\.keys is \[2, 8, 16\], not \["),
        ({"1.keys": keys * torch.nan}, no_inverse),
        ({"1.keys": keys * 0}, no_inverse),
    ]:
        write_bases(directory, tensors | damaged)
        bases = open_bases(directory, config.layout())
        assert bases and bases.of(0, rank=0, device=CPU)
        with pytest.raises(SpecError, match=message):
            bases.of(1, rank=0, device=CPU)


def test_bases_that_change_while_a_replica_starts_are_refused(tiny_model: MakeModel) -> None:
    """Its blocks would carry the fingerprint of other bases, also on disk."""
    directory, _ = tiny_model("llama")
    config = EngineConfig(model_dir=directory, pool_dtype="int4")
    write_random(directory, config)
    layout = config.layout()
    write_random(directory, config, seed=1)
    with pytest.raises(SpecError, match="was replaced while the replica started"):
        open_bases(directory, layout)
    (directory / FILE).unlink()
    (directory / FILE).mkdir()
    with pytest.raises(SpecError, match="cannot be read: Is a directory"):
        config.layout()
    with pytest.raises(SpecError, match="cannot be written: Is a directory"):
        write_bases(directory, {})
    assert not (directory / f".{FILE}").exists()


@pytest.mark.parametrize("dim", [32, 64, 80, 128])
def test_calibrated_basis_lowers_the_error_of_scores(dim: int) -> None:
    """Keys with a large mean and unequal channels; half of the rows calibrate, half are measured."""
    torch.manual_seed(dim)
    spread_D = torch.logspace(0, -1.5, dim)
    k = 4 * torch.randn(dim) * spread_D + torch.randn(2000, dim) * spread_D
    k[::50] = -2 * k[::50]  # rows far from the mean, as at a sequence's start
    q = torch.randn(2000, dim) * spread_D.flip(0)
    seen = k[::2].double()
    metric = q[::2].double().mT @ q[::2].double()
    mean = seen.mean(0)
    matrix = _basis(seen.mT @ seen / len(seen) - mean.outer(mean), metric, mean).to(torch.bfloat16)[None]
    basis = KVBasis.of(matrix, matrix, CPU)
    stored_q, stored_k, _ = basis.of_heads(q[1::2, None], k[1::2, None], k[1::2, None])
    exact = q[1::2] @ k[1::2].mT

    def error(q_TD: Tensor, k_TD: Tensor) -> float:
        rounded = dequantize_rows(*quantize_rows(k_TD, INT4), torch.float32)
        return float((q_TD @ rounded.mT - exact).square().mean())

    assert error(stored_q[:, 0], stored_k[:, 0]) < error(q[1::2], k[1::2]) / 4


def test_descent_lowers_the_error_of_unseen_rows() -> None:
    """Readers differ from row to row, which the first basis ignores."""
    torch.manual_seed(0)
    mix, spread_D = torch.randn(2, 32, 32), torch.logspace(0, -1, 32)

    def prompt(num_rows: int) -> _Seen:
        kind_T, kind_R = torch.arange(num_rows) % 2, torch.arange(40) % 2
        rows_TD = (torch.randn(num_rows, 1, 32) * spread_D @ mix[kind_T]).squeeze(1)
        readers_RD = (torch.randn(40, 1, 32) * spread_D @ mix[kind_R]).squeeze(1)
        return _Seen(rows_TD, readers_RD, (kind_R.unsqueeze(1) == kind_T).float() + 0.01)

    seen, unseen = [prompt(200) for _ in range(8)], prompt(400)

    def error(basis_DD: Tensor) -> float:
        basis = KVBasis.of(basis_DD[None], basis_DD[None], CPU)
        rows_TD = unseen.rows_TD @ basis.keys[0]
        error_TD = dequantize_rows(*quantize_rows(rows_TD, INT4), torch.float32) - rows_TD
        error_RT = unseen.readers_RD @ (error_TD @ basis.outputs[0]).mT
        return float((unseen.weights_RT * error_RT.square()).sum())

    first = _first_basis(seen)
    assert error(_refined(first, seen)) < 0.8 * error(first.to(torch.bfloat16))
    unread = [_Seen(one.rows_TD, one.readers_RD, torch.zeros_like(one.weights_RT)) for one in seen]
    assert _refined(_first_basis(unread), unread).isfinite().all()


@pytest.mark.parametrize(("name", "changes"), [("llama", {}), ("gemma4", GEMMA4)])
def test_calibration_covers_every_layer_with_kv(
    name: str, changes: dict[str, Any], tiny_model: MakeModel, make_runner: MakeRunner
) -> None:
    directory, model = tiny_model(name, **changes)
    seen, (tokens,) = prompts(64, 64, 64), prompts(40)
    exact = reference_logits(model, tokens)[-1]
    bases = bases_of(directory, seen, num_steps=10)
    layout = EngineConfig(model_dir=directory, pool_dtype="int4").layout()
    assert {*bases} == {f"{layer}.{side}" for layer in range(layout.num_layers) for side in ("keys", "values")}
    write_bases(directory, bases)
    logits = step(make_runner(directory, pool_dtype="int4"), [tokens], [(0, 0, 40)])[0]
    assert 0 < (logits - exact).abs().mean() < 0.5 * exact.std()


def test_calibration_skips_recurrent_layers(tiny_model: MakeModel) -> None:
    directory, _ = tiny_model("lfm2", **LFM2)
    bases = bases_of(directory, prompts(20), num_steps=0)
    assert {*bases} == {f"{layer}.{side}" for layer in range(2) for side in ("keys", "values")}


def test_calibration_needs_no_kernels(tiny_model: MakeModel) -> None:
    """It computes on the CPU also where kernels run on a GPU only, unlike in this process."""
    directory, _ = tiny_model("llama")
    program = (
        "import sys; from pathlib import Path; from engine.quantization.kv_calibration import bases_of\n"
        "print(sorted(bases_of(Path(sys.argv[1]), [[1, 2, 3, 4, 5]], num_steps=0)))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program, str(directory)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "['0.keys', '0.values', '1.keys', '1.values', '2.keys', '2.values']", done.stderr
