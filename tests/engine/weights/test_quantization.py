"""Checkpoints in each quantized format, compared with transformers on the dequantized numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from core.model.gguf_import import import_gguf
from core.model.weight_formats import check_method
from core.types.errors import SpecError
from engine.config import EngineConfig
from engine.layers.low_bit_matrix import CodedMatrix
from engine.layers.shards import ShardReader
from engine.runner.parallel import TensorParallel
from engine.runner.runner import ModelRunner
from engine.weights.checkpoint import Checkpoint
from engine.weights.formats import FORMATS as TABLE_OF_FORMATS
from engine.weights.formats import activations_of, kind_of
from engine.weights.open_checkpoint import open_checkpoint
from engine.weights.quantized_weight import QuantizedWeight
from tests.engine import quantized_files
from tests.engine.gguf_files import write_model
from tests.engine.quantized_files import awq, check_numbers, gptq, write_quantised
from tests.engine.steps import prompts, step
from tests.engine.tiny_models import random_model, reference_logits, tiny_config
from tests.support.grids import quick

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2}
CPU = torch.device("cpu")


def make_runner(directory: Path) -> ModelRunner:
    return ModelRunner(EngineConfig(model_dir=directory, dtype="float32", block_size=8, num_blocks=12))


OWNED = sorted(path.stem for path in (Path(__file__).parent / "formats").glob("*.safetensors"))


def recorded(stem: str) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]:
    """Return the tensors of a file in formats/, their numbers, and the settings."""
    path = Path(__file__).parent / "formats" / f"{stem}.safetensors"
    with safe_open(path, framework="pt") as file:
        config = json.loads(file.metadata()["quantization_config"])
    tensors = load_file(path)
    return tensors, tensors.pop("numbers"), config


@pytest.mark.parametrize("stem", OWNED)
def test_numbers_equal_the_formats_own_library(stem: str, tmp_path: Path) -> None:
    """Packed and dequantized by the library that owns the format; see formats/make.py."""
    check_numbers(tmp_path, *recorded(stem))


@pytest.mark.parametrize("known", [{"weight_scale_method": "row"}, {"checkpoint_format": "float8_e4m3fn"}])
def test_gptqmodels_fp8_divides_by_its_scales_by_default(known: dict[str, str], tmp_path: Path) -> None:
    """GPTQModel 7.7 loads its own files without `weight_scale_semantics` as inverse."""
    tensors, numbers, _ = recorded("gptqmodel_fp8")
    check_numbers(tmp_path, tensors, numbers, {"quant_method": "fp8", **known})


def test_early_name_of_the_settings(tmp_path: Path) -> None:
    check_numbers(tmp_path, *recorded("int4_pack"), key="compression_config")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"config_groups": {"0": {"input_activations": {"type": "int", "num_bits": 8}}}}, torch.int8),
        ({"config_groups": {"0": {"input_activations": {"type": "float", "num_bits": 8}}}}, torch.float8_e4m3fn),
        ({"config_groups": {"0": {"input_activations": {"type": "int", "num_bits": 8}}, "1": {}}}, None),
        ({"config_groups": {"0": {"weights": {"num_bits": 4}, "input_activations": None}}}, None),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, torch.float8_e4m3fn),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, None),
    ],
)
def test_only_formats_that_quantize_all_inputs_say_so(config: dict[str, Any], expected: torch.dtype | None) -> None:
    assert activations_of(config) is expected


def _with_nested_blocks_of(size: int) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = "w.weight.quant_state.bitsandbytes__nf4"
        state = json.loads(bytes(tensors[name].tolist())) | {"nested_blocksize": size}
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


def _without_scale_columns(tensors: dict[str, torch.Tensor]) -> None:
    tensors["w.weight_scale"] = tensors["w.weight_scale"][:, ::2]


@pytest.mark.parametrize(
    ("stem", "change", "message"),
    [
        # Groups, bits, zero points and orders that the settings name are not guessed from shapes.
        ("int4_pack", _without_scale_columns, "do not fit 64 outputs and 96 inputs in blocks"),
        ("modelopt_mxfp8", _without_scale_columns, "do not fit 64 outputs and 96 inputs in blocks"),
        ("nvfp4", lambda t: t.update({"w.weight_scale": t["w.weight_scale"][:1, :1]}), "do not fit"),
        ("int4_pack", lambda t: t.update({"w.weight_packed": t["w.weight_packed"].repeat(1, 2)}), "unknown bits"),
        ("int4_pack", lambda t: t.pop("w.weight_shape"), "weight_shape is missing"),
        ("int4_pack_zeros", lambda t: t.pop("w.weight_zero_point"), "weight_zero_point is missing"),
        ("int5_pack_zeros", lambda t: t.update({"w.weight_zero_point": t["w.weight_zero_point"][:-1]}), "too few"),
        ("gptq_4", lambda t: t.pop("w.g_idx"), "no g_idx, which its settings"),
        ("awq_gemm", lambda t: t.update({"w.weight": torch.ones(64, 96)}), "w.weight is in the files in two formats"),
        ("int4_pack", lambda t: t.update({"w.weight": torch.ones(64, 96)}), "w.weight .* is in no supported format"),
        # Tensors of other dimensions, and incomplete ones.
        ("int4_pack", lambda t: t.update({"w.weight_shape": torch.tensor(64)}), "weight_shape is 64"),
        ("int4_pack", lambda t: t.update({"w.weight_packed": t["w.weight_packed"][0]}), "has 1 dimensions, expected 2"),
        ("int4_pack", lambda t: t.update({"w.weight_packed": t["w.weight_packed"][:0]}), "weight_packed is empty"),
        ("awq_gemm", lambda t: t.update({"w.scales": t["w.scales"].flatten()}), "scales has 1 dimensions, expected 2"),
        # Three and eight bits instead of four.
        ("awq_gemm", lambda t: t.update({"w.qweight": t["w.qweight"][:, :6]}), "qweight: codes of 3 bits"),
        ("awq_gemm", lambda t: t.update({"w.qweight": t["w.qweight"].repeat(1, 2)}), "qweight: codes of 8 bits"),
        ("awq_marlin", lambda t: t.update({"w.qweight": t["w.qweight"][:, :-1]}), "qweight of shape .* marlin"),
        ("awq_gemv_fast", lambda t: t["w.qzeros"].fill_(float("nan")), "not a finite number"),
        ("nvfp4", lambda t: t["w.weight_global_scale"].fill_(1e-40), "not a finite number"),
        ("fp8_channels", lambda t: t["w.weight"].view(torch.uint8)[-1].fill_(0xFF), "w.weight has a code that is not"),
        ("modelopt_w4a16_awq", lambda t: t.update({"w.pre_quant_scale": torch.ones(95)}), "is not 96 numbers"),
        ("mxfp4_experts", lambda t: t.update({"experts.w_scales": t["experts.w_scales"][:1]}), "has 1 experts"),
        ("bnb_int8", lambda t: t.update({"w.SCB": t["w.SCB"][0].clone()}), "do not fit 64 outputs"),
        ("bnb_nf4", lambda t: t.pop("w.weight.quant_map"), "quant_map is missing, expected 16"),
        ("bnb_nf4", lambda t: t["w.weight.quant_map"].fill_(float("nan")), "not a finite number"),
        ("bnb_nf4", lambda t: t.update({"w.weight": t["w.weight"][:-1]}), "does not hold 64 x 96 codes"),
        ("bnb_nf4_nested", lambda t: t.pop("w.weight.nested_absmax"), "nested_absmax is missing"),
        ("bnb_nf4_nested", _with_nested_blocks_of(1 << 70), "does not hold the shape and blocksize"),
    ],
)  # fmt: skip
def test_contradictory_tensors_are_rejected(
    stem: str, change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    tensors, _, config = recorded(stem)
    change(tensors)
    with pytest.raises(SpecError, match=message):
        checkpoint = write_checkpoint(tmp_path, tensors, config)
        checkpoint.read(next(name for name in checkpoint.shapes if name.endswith(".weight")))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"global_quant_config": {"weight": {"dtype": "fp4", "scale_format": "e8m0"}}}, ""),
        ({"layer_quant_config": {"*.mlp.*": {"weight": {"dtype": "fp8_e4m3"}}, "*.self_attn.*": {}}}, ""),
        ({"global_quant_config": {"weight": {"dtype": "fp4", "scale_format": "float32"}}}, "weight fp4 float32 is not"),
        ({"layer_type_quant_config": {"Linear": {"weight": {"dtype": "fp6_e3m2"}}}}, "weight fp6_e3m2 is not"),
        ({"global_quant_config": {"weight": [{"dtype": "fp8_e4m3"}, {"dtype": "int4"}]}}, "weight in two stages"),
        ({"layer_quant_config": "none"}, "layer_quant_config is 'none', and must hold objects"),
        ({"global_quant_config": ["fp4"]}, "global_quant_config is .*, and must hold objects"),
    ],
)
def test_quark_is_read_in_the_types_of_its_table(layers: dict[str, Any], message: str) -> None:
    config = {"quant_method": "quark", **layers}
    if not message:
        return check_method(config)
    with pytest.raises(SpecError, match=message):
        check_method(config)


@pytest.mark.parametrize(("method", "key"), [("awq", "version"), ("gptq", "checkpoint_format")])
def test_layout_may_be_in_capitals(method: str, key: str) -> None:
    config = {"quant_method": method, key: {"awq": "GEMM", "gptq": "GPTQ_V2"}[method]}
    check_method(config)
    assert kind_of(config) in {row.kind for row in TABLE_OF_FORMATS}


PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("gptq", "quantization_config is 'gptq', and must be an object"),
        (PACKED | {"config_groups": ["group_0"]}, "config_groups is .*, and must hold objects"),
        (PACKED | {"config_groups": {"group_0": 4}}, "config_groups is .*, and must hold objects"),
        (PACKED | {"config_groups": {"group_0": {"weights": {"group_size": "32"}}}}, "group_size is '32'"),
        (PACKED | {"config_groups": {"group_0": {"weights": {"block_structure": [0, 32]}}}}, "block_structure is"),
        (PACKED | {"transform_config": "rotate"}, r"transform_config \(rotate\)"),
        # 96 inputs are three groups of either size.
        (
            PACKED | {"config_groups": {str(g): {"weights": {"group_size": g, "num_bits": 4}} for g in (32, 40)}},
            "fit blocks of 1 x 32 and of 1 x 40",
        ),
    ],
)
def test_odd_settings_are_rejected(config: object, message: str, tmp_path: Path) -> None:
    parts = {
        "weight_packed": torch.zeros(16, 12, dtype=torch.int32),
        "weight_scale": torch.ones(16, 3),
        "weight_shape": torch.tensor((16, 96)),
    }
    with pytest.raises(SpecError, match=message):
        write_matrix(tmp_path, parts, config).read("w.weight")


@pytest.mark.parametrize(
    ("stem", "settings", "message"),
    [
        # AutoAWQ pads 4 groups of 32 inputs to 32; one group, or 32 of 4 inputs, would be padded to other numbers.
        ("awq_gemv", {"group_size": -1}, "w.scales: scales of shape .* do not fit 64 outputs and 128 inputs"),
        ("awq_gemv", {"group_size": None}, "w.scales: scales of shape .* do not fit 64 outputs and 128 inputs"),
        # Zero points of an unnamed version would be a guess.
        ("gptqmodel_4", {"quant_method": "fp8"}, r"w.qweight \(I32\) with w.scales \(F16\) is in no supported format"),
        # The other version stores zero points less one.
        ("gptqmodel_4_v2", {"sym": True}, "w.qzeros, read in the layout gptq_v2, has zero points other than 8, but"),
    ],
)
def test_settings_that_contradict_the_tensors_are_rejected(
    stem: str, settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    tensors, _, config = recorded(stem)
    with pytest.raises(SpecError, match=message):
        write_checkpoint(tmp_path, tensors, config | settings).read("w.weight")


def test_inverse_scales_may_be_powers_of_two(tmp_path: Path) -> None:
    parts = {"weight": torch.ones(4, 8).to(torch.float8_e4m3fn)}
    parts["weight_scale_inv"] = torch.full((4,), 4.0).to(torch.float8_e8m0fnu)
    checkpoint = write_matrix(tmp_path, parts, {"quant_method": "fp8", "weight_scale_method": "row"})
    assert torch.equal(checkpoint.read("w.weight"), torch.full((4, 8), 0.25))


@pytest.mark.parametrize("num_inputs", [8, 16, 24])
def test_settings_give_the_bits_of_narrow_matrices(num_inputs: int, tmp_path: Path) -> None:
    """Codes of three and of four bits fill equally many words."""
    words = torch.full((16, num_inputs // 8), 0x59595959, dtype=torch.int32)
    parts = {"weight_packed": words, "weight_scale": torch.ones(16, 1), "weight_shape": torch.tensor((16, num_inputs))}
    weights = {"num_bits": 4, "strategy": "channel"}
    checkpoint = write_matrix(tmp_path, parts, PACKED | {"config_groups": {"group_0": {"weights": weights}}})
    assert torch.equal(checkpoint.read("w.weight"), torch.tensor([1.0, -3.0]).repeat(16, num_inputs // 2))


def test_fused_parts_keep_their_own_factors(tmp_path: Path) -> None:
    """One global scale for q, k and v would be wrong, and folding the others into e4m3 scales would round."""
    stored, _, config = recorded("nvfp4")
    tensors = {name.replace("w.", f"{part}."): value.clone() for name, value in stored.items() for part in "qk"}
    tensors["k.weight_global_scale"] *= 3
    checkpoint = write_checkpoint(tmp_path, tensors, config)
    for rank in range(2):
        rows = (32 * rank, 32 * rank + 32)
        reader = ShardReader(checkpoint, TensorParallel(), torch.float32, CPU)
        x, expected = torch.randn(3, 96), torch.cat([checkpoint.read(f"{part}.weight", rows=rows) for part in "qk"])
        torch.testing.assert_close(reader.linear({"q": rows, "k": rows})(x), x @ expected.T)
    assert not torch.allclose(expected[:32], expected[32:])


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_gguf_without_kernels_is_widened_and_named(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = random_model(tiny_config("llama", **SHAPE))
    write_model(tmp_path / "m.gguf", model, quantized=kind)
    import_gguf(tmp_path / "m.gguf", tmp_path)
    (tokens,) = prompts(30)
    logits = step(make_runner(tmp_path), [tokens], [(0, 0, 30)])
    torch.testing.assert_close(logits[0], reference_logits(model, tokens)[-1], atol=2e-4, rtol=1e-4)
    assert "quantized matrices are held in float32" in caplog.text and "layers.0.self_attn.q_proj" in caplog.text


def test_last_group_may_be_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_files, "GROUP", 40)
    parts, numbers = awq(torch.randn(16, 96, generator=torch.Generator().manual_seed(0)))
    checkpoint = write_matrix(tmp_path, parts, {"quant_method": "awq", "bits": 4, "group_size": 40})
    torch.testing.assert_close(checkpoint.read("w.weight"), numbers)
    torch.testing.assert_close(checkpoint.read("w.weight", columns=(70, 96)), numbers[:, 70:96])


@pytest.mark.parametrize(
    "wrong",
    [
        {"scales": torch.ones(5, 16).half(), "qzeros": torch.zeros(5, 2, dtype=torch.int32)},
        {"scales": torch.ones(0, 16).half(), "qzeros": torch.zeros(0, 2, dtype=torch.int32)},
        {"scales": torch.ones(6, 8).half()},
        {"qzeros": torch.zeros(4, 2, dtype=torch.int32)},
        {"qzeros": torch.zeros(6, 2)},
        {"scales": torch.ones(6).half()},
        {"g_idx": torch.arange(96) // 16 + 1},
        {"g_idx": torch.arange(96) // 16 - 1},
        {"g_idx": torch.arange(80) // 16},
        {"qweight": torch.zeros(12, 16)},
    ],
    ids=lambda wrong: ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in wrong.items()),
)
def test_mismatched_groups_are_rejected(tmp_path: Path, wrong: dict[str, torch.Tensor]) -> None:
    parts, _ = gptq(torch.randn(16, 96, generator=torch.Generator().manual_seed(0)))
    del parts["g_idx"]
    with pytest.raises(SpecError, match=r"^w"):
        write_matrix(tmp_path, parts | wrong, {"quant_method": "gptq", "bits": 4, "group_size": 16}).read("w.weight")


def write_matrix(directory: Path, parts: dict[str, torch.Tensor], description: object) -> Checkpoint:
    return write_checkpoint(directory, {f"w.{suffix}": part for suffix, part in parts.items()}, description)


def write_checkpoint(directory: Path, tensors: dict[str, torch.Tensor], description: object) -> Checkpoint:
    save_file({name: part.contiguous() for name, part in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": description}))
    return open_checkpoint(directory)


@pytest.mark.parametrize(
    "kind", quick(["fp8 blocks", "fp8 tensor", "int8 channels", "awq", "gptq"], ["fp8 tensor", "gptq"])
)
def test_low_bit_model_on_gpu_kernels(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole model with GPU-format matrices, by its kernels in the interpreter; its steps are captured."""
    pytest.importorskip("triton")
    kept: list[CodedMatrix] = []

    def keep(_: ShardReader, *weights: QuantizedWeight) -> CodedMatrix:
        matrix = CodedMatrix.of(weights, CPU)
        assert matrix is not None
        kept.append(matrix)
        return matrix

    monkeypatch.setattr(ShardReader, "in_stored_bits", keep)
    model = random_model(tiny_config("llama", **SHAPE))
    write_quantised(tmp_path, model, kind)
    recorded: list[Callable[[], None]] = []

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        recorded.append(step)
        return step

    config = EngineConfig(model_dir=tmp_path, dtype="float32", block_size=8, num_blocks=12, recorded_rows=1)
    runner = ModelRunner(config, capture=capture)
    assert recorded and len(kept) == 8, "qkv, output, gate_up and down of two layers"
    (tokens,) = prompts(5)
    logits = step(runner, [tokens], [(0, 0, 5)])
    torch.testing.assert_close(logits[0], reference_logits(model, tokens)[-1], atol=2e-4, rtol=1e-4)
