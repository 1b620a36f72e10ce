"""Models quantized and saved by the libraries that own the formats, compared with those libraries' own numbers.

    pip install --no-deps accelerate amd-quark auto-round bitsandbytes compressed-tensors gptqmodel llmcompressor …

A library that is not installed skips its cases. Single matrices of the same formats are in the default set: formats/.
"""

from __future__ import annotations

import copy
import importlib
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from engine.config import EngineConfig
from engine.runner.runner import ModelRunner
from tests.engine import gang
from tests.engine.gang import StartGang
from tests.engine.quantized_files import check_numbers
from tests.engine.steps import VOCAB_SIZE, prompts, step
from tests.engine.tiny_models import random_model, reference_logits, tiny_config
from tests.engine.weights.formats.make import MAKERS

# Quark reads all of transformers when it is imported.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
EXPERTS = SHAPE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
# Of the prompts.
LENGTHS = (30, 9, 17)
# Writes the model of a directory to another, and returns the model, or one's directory, with the library's own numbers.
Write = Callable[[Path, Path], PreTrainedModel | Path]


def bitsandbytes(**settings: Any) -> Write:
    def write(source: Path, into: Path) -> PreTrainedModel:
        pytest.importorskip("bitsandbytes")
        from transformers import BitsAndBytesConfig

        quantization = BitsAndBytesConfig(**settings)
        model = AutoModelForCausalLM.from_pretrained(source, quantization_config=quantization, dtype=torch.float32)
        model.save_pretrained(into)
        widened: PreTrainedModel = model.dequantize(torch.float32)
        return widened

    return write


def llm_compressor(scheme: str) -> Write:
    def write(source: Path, into: Path) -> PreTrainedModel:
        llmcompressor = pytest.importorskip("llmcompressor")
        from llmcompressor.modifiers.quantization import QuantizationModifier

        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        ignore = ["lm_head", r"re:.*layers\.1\.mlp\.down_proj", r"re:.*mlp\.gate$"]
        llmcompressor.oneshot(model=model, recipe=QuantizationModifier(targets="Linear", ignore=ignore, scheme=scheme))
        # Not the saved model, whose 4-bit floats the library rounds to bfloat16.
        reference = copy.deepcopy(model)
        for module in reference.modules():
            if hasattr(module, "quantization_scheme"):
                module.quantization_scheme.input_activations = None
        model.save_pretrained(into, save_compressed=True)
        return reference

    return write


def model_optimizer(name: str) -> Write:
    def write(source: Path, into: Path) -> PreTrainedModel | Path:
        quantization = pytest.importorskip("modelopt.torch.quantization")
        export = pytest.importorskip("modelopt.torch.export.unified_export_hf")
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        settings, is_awq = copy.deepcopy(getattr(quantization, name)), "AWQ" in name
        if not is_awq:
            settings["quant_cfg"].append({"quantizer_name": "*input_quantizer", "enable": False})
        tokens = torch.tensor(prompts(64, 64))
        quantization.quantize(model, settings, lambda quantized: quantized(tokens))
        export.requantize_resmooth_fused_llm_layers(model)
        reference = copy.deepcopy(model)
        export.export_hf_checkpoint(model, export_dir=into)
        if not is_awq:
            # Its simulation of these formats needs a GPU.
            return _widened_by_model_optimizer(source, into)
        quantization.fold_weight(reference)
        return reference

    return write


def _widened_by_model_optimizer(source: Path, into: Path) -> Path:
    kinds = pytest.importorskip("modelopt.torch.quantization.qtensor")
    tensors = load_file(into / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        stem = name.removesuffix("_scale")
        codes, scale = tensors.pop(stem), tensors.pop(name)
        if (double := tensors.pop(f"{stem}_scale_2", None)) is not None:
            stored = kinds.NVFP4QTensor((codes.shape[0], 2 * codes.shape[1]), torch.float32, codes)
            numbers = stored.dequantize(torch.float32, scale=scale, double_scale=double, block_sizes={-1: 16})
        elif scale.dtype == torch.uint8:
            numbers = kinds.MXFP8QTensor(codes.shape, torch.float32, codes).dequantize(torch.float32, scale=scale)
        else:
            numbers = kinds.FP8QTensor(codes.shape, torch.float32, codes).dequantize(torch.float32, scale=scale)
        tensors[stem] = numbers
    return _with_weights(source, tensors)


def _with_weights(source: Path, tensors: dict[str, Tensor]) -> Path:
    """Write a copy of the source with other weights."""
    plain = source.parent / "widened"
    shutil.copytree(source, plain)
    stored = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
    save_file(stored, plain / "model.safetensors", metadata={"format": "pt"})
    return plain


def gptq_model(**settings: Any) -> Write:
    def write(source: Path, into: Path) -> Path:
        os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it needs two
        library = pytest.importorskip("gptqmodel")
        kinds = importlib.import_module("gptqmodel.nn_modules.qlinear")
        kind = settings.get("method", "gptq")
        model = library.GPTQModel.load(str(source), library.QuantizeConfig(**settings), device="cpu")
        texts = [{"input_ids": tokens, "attention_mask": [1] * len(tokens)} for tokens in prompts(*[64] * 8)]
        model.quantize(texts, batch_size=1)
        model.save(str(into))
        backend = library.BACKEND[f"{kind}_torch".upper()]
        loaded = library.GPTQModel.load(str(into), device="cpu", backend=backend, dtype=torch.float16)
        tensors = load_file(into / "model.safetensors")
        for name, module in loaded.model.named_modules():
            if isinstance(module, kinds.BaseQuantLinear):
                parts = {end: tensors.pop(part) for part in list(tensors) if (end := _end(part, name))}
                for end in parts.keys() & {"scales", "weight_scale_inv"}:
                    setattr(module, end, parts[end].float())
                tensors[f"{name}.weight"] = _widened_by_gptq_model(module, kind).float().T
        return _with_weights(source, tensors)

    return write


def _end(name: str, stem: str) -> str:
    return name.removeprefix(f"{stem}.") if name.startswith(f"{stem}.") else ""


def _widened_by_gptq_model(module: Any, kind: str) -> Tensor:
    """Return the weights (I, O) in the dtype of the scales: its own products round to half precision."""
    if kind == "awq":
        packing = importlib.import_module("gptqmodel.quantization.awq.utils.packing_utils")
        stored = (module.qweight, module.qzeros, module.scales)
        numbers: Tensor = packing.dequantize_gemm(*stored, module.bits, module.group_size)
        return numbers
    widened: Tensor = module.dequantize_weight()
    return widened


def quark(spec: str, **settings: Any) -> Write:
    def write(source: Path, into: Path) -> PreTrainedModel:
        library = pytest.importorskip("quark.torch")
        configs = importlib.import_module("quark.torch.quantization.config.config")
        weight = getattr(configs, spec)(is_dynamic=False, **settings).to_quantization_spec()
        layers, exclude = configs.QLayerConfig(weight=weight), ["lm_head", "*.gate"]
        quantizer = library.ModelQuantizer(configs.QConfig(global_quant_config=layers, exclude=exclude))
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        model = quantizer.freeze(quantizer.quantize_model(model, [torch.tensor(prompts(64, 64))]))
        library.export_safetensors(copy.deepcopy(model), into)
        # Its modules round their weights in each product.
        reference: PreTrainedModel = model
        return reference

    return write


def auto_round(form: str, **settings: Any) -> Write:
    def write(source: Path, into: Path) -> Path:
        AutoRound = pytest.importorskip("auto_round").AutoRound
        AutoRound(str(source), iters=0, disable_opt_rtn=True, **settings).quantize_and_save(str(into), format=form)
        for nested in into.glob("*/config.json"):  # named after the settings, in some formats
            shutil.copytree(nested.parent, into, dirs_exist_ok=True)
        model = AutoModelForCausalLM.from_pretrained(into, dtype=torch.float32)
        shapes = {name: tensor.shape for name, tensor in load_file(source / "model.safetensors").items()}
        tensors = {name: tensor for file in into.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for stem in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
            for name in [name for name in tensors if name.startswith(f"{stem}.")]:
                del tensors[name]
            # The library runs its models in half precision.
            unit_II = torch.eye(shapes[f"{stem}.weight"][1])
            tensors[f"{stem}.weight"] = model.get_submodule(stem).float()(unit_II).T
        return _with_weights(source, tensors)

    return write


DYNAMIC: dict[str, dict[str, Any]] = {
    r"-:.*layers\.1\.mlp.*": {},
    r"+:.*layers\.0\.self_attn.*": {"bits": 8, "group_size": 64},
    r".*layers\.0\.mlp\.down.*": {"bits": 2, "sym": False},
}
AWQ: dict[str, Any] = {"method": "awq", "format": "gemm"}
FP8: dict[str, Any] = {"bits": 8, "format": "float8_e4m3fn"}
ROUNDING = {"symmetric": True, "scale_type": "float", "round_method": "half_even"}

WRITERS: dict[str, tuple[str, Write]] = {
    "NF4": ("llama", bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)),
    "FP4": ("llama", bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4")),
    "INT8": ("llama", bitsandbytes(load_in_8bit=True)),
    **{
        scheme: ("llama", llm_compressor(scheme))
        for scheme in ("W4A16", "W4A16_ASYM", "NVFP4A16", "MXFP4A16", "FP8_DYNAMIC", "W8A8")
    },
    "W4A16 experts": ("qwen3_moe", llm_compressor("W4A16")),
    **{
        name: ("llama", model_optimizer(name))
        for name in ("FP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG", "MXFP8_DEFAULT_CFG", "INT4_AWQ_CFG")
    },
    "NVFP4 experts": ("qwen3_moe", model_optimizer("NVFP4_DEFAULT_CFG")),
    **{f"GPTQModel {bits}": ("llama", gptq_model(bits=bits, group_size=32)) for bits in (2, 3, 4, 8)},
    "GPTQModel rows": ("llama", gptq_model(bits=4, group_size=-1, act_group_aware=False)),
    "GPTQModel desc_act": ("llama", gptq_model(bits=4, group_size=32, desc_act=True)),
    "GPTQModel without symmetry": ("llama", gptq_model(bits=4, group_size=32, sym=False)),
    "GPTQModel v2": ("llama", gptq_model(bits=4, group_size=32, sym=False, format="gptq_v2")),
    "GPTQModel dynamic": ("llama", gptq_model(bits=4, group_size=32, dynamic=DYNAMIC)),
    "GPTQModel lm_head": ("llama", gptq_model(bits=4, group_size=32, lm_head=True)),
    "GPTQModel experts": ("qwen3_moe", gptq_model(bits=4, group_size=32, desc_act=True)),
    "GPTQModel AWQ": ("llama", gptq_model(bits=4, group_size=32, sym=False, **AWQ)),
    "GPTQModel AWQ dynamic": ("llama", gptq_model(bits=4, group_size=32, dynamic={r"-:.*layers\.1\.mlp.*": {}}, **AWQ)),
    "GPTQModel AWQ experts": ("qwen3_moe", gptq_model(bits=4, group_size=32, sym=False, **AWQ)),
    **{
        f"GPTQModel FP8 {scales}": ("llama", gptq_model(method="fp8", weight_scale_method=scales, **more))
        for scales, more in (("tensor", FP8), ("row", FP8), ("block", FP8 | {"weight_block_size": [32, 32]}))
    },
    "Quark FP8": ("llama", quark("FP8E4M3PerTensorSpec", observer_method="min_max")),
    "Quark FP8 rows": ("llama", quark("FP8E4M3PerChannelSpec", ch_axis=0)),
    "Quark INT8": ("llama", quark("Int8PerChannelSpec", ch_axis=0, **ROUNDING)),
    "Quark MXFP4": ("llama", quark("OCP_MXFP4Spec", ch_axis=-1)),
    "Quark MXFP4 experts": ("qwen3_moe", quark("OCP_MXFP4Spec", ch_axis=-1)),
    "auto-round gptq": ("llama", auto_round("auto_round:auto_gptq", scheme="W4A16")),
    "auto-round awq": ("llama", auto_round("auto_round:auto_awq", scheme="W4A16")),
    "auto-round experts": ("qwen3_moe", auto_round("auto_round", scheme="W4A16", group_size=32)),
}


@pytest.mark.parametrize("case", WRITERS)
def test_logits_equal_the_librarys(case: str, tmp_path: Path, start_gang: StartGang) -> None:
    family, _ = WRITERS[case]
    source, into = tmp_path / "source", tmp_path / "quantized"
    random_model(tiny_config(family, **(SHAPE if family == "llama" else EXPERTS))).save_pretrained(source)
    words = Tokenizer(WordLevel({str(i): i for i in range(VOCAB_SIZE)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(source)
    sequences = prompts(*LENGTHS)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as library:  # some patch transformers
        found = library.submit(_write, case, source, into).result()
    if isinstance(found, Path):
        found = _logits(AutoModelForCausalLM.from_pretrained(found, dtype=torch.float32))
    expected = [torch.tensor(logits) for logits in found]
    for weights in ("widen", "auto"):
        config = EngineConfig(model_dir=into, dtype="float32", weights=weights, block_size=8, num_blocks=12)
        check(step(ModelRunner(config), sequences[:1], [(0, 0, 30)]), [expected[0][-1]])
    for rank in start_gang(2, gang.logits_in_three_steps, into, sequences, "float32"):
        _, prompt_logits, token_logits = rank.result(60)
        check(prompt_logits, [logits[-2] for logits in expected])
        check(token_logits, [logits[-1] for logits in expected])


@torch.no_grad()
def _write(case: str, source: Path, into: Path) -> Path | list[Any]:
    """Write the model of a case. Return the logits of each prompt, or the directory of a model that has them."""
    _, write = WRITERS[case]
    os.chdir(source.parent)  # some write logs
    model = write(source, into)
    return model if isinstance(model, Path) else _logits(model)


@torch.no_grad()
def _logits(model: PreTrainedModel) -> list[Any]:
    """Return the logits of each prompt, (T, V) arrays."""
    return [reference_logits(model.eval(), tokens).numpy() for tokens in prompts(*LENGTHS)]


@pytest.mark.parametrize("name", MAKERS)
def test_matrix_equals_the_librarys(name: str, tmp_path: Path) -> None:
    """Compare the matrices of the default set, written by the installed versions."""
    try:
        written = MAKERS[name]()
    except ModuleNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed; see formats/make.py")
    check_numbers(tmp_path, written.tensors, written.numbers.float(), written.config)


def check(found: Tensor, expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-3, rtol=1e-3)
