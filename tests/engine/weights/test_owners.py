"""Models quantized and saved by the libraries that own the formats, compared with those libraries' own numbers.

    pip install --no-deps accelerate auto-round bitsandbytes compressed-tensors llmcompressor nvidia-modelopt …

A library that is not installed skips its cases. Single matrices of the same formats are in the default set: formats/.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
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

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
EXPERTS = SHAPE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
# Writes the model of a directory to another, and returns the model with the library's own numbers.
Write = Callable[[Path, Path], PreTrainedModel]


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
    def write(source: Path, into: Path) -> PreTrainedModel:
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


def _widened_by_model_optimizer(source: Path, into: Path) -> PreTrainedModel:
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
    plain = into.parent / "widened"
    shutil.copytree(source, plain)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    return model


def auto_round(form: str, **settings: Any) -> Write:
    def write(source: Path, into: Path) -> PreTrainedModel:
        AutoRound = pytest.importorskip("auto_round").AutoRound
        AutoRound(str(source), iters=0, disable_opt_rtn=True, **settings).quantize_and_save(str(into), format=form)
        for nested in into.glob("*/config.json"):  # named after the settings, in some formats
            shutil.copytree(nested.parent, into, dirs_exist_ok=True)
        return AutoModelForCausalLM.from_pretrained(into, dtype=torch.float32)

    return write


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
    "auto-round gptq": ("llama", auto_round("auto_round:auto_gptq", scheme="W4A16")),
    "auto-round awq": ("llama", auto_round("auto_round:auto_awq", scheme="W4A16")),
    "auto-round experts": ("qwen3_moe", auto_round("auto_round", scheme="W4A16", group_size=32)),
}


@pytest.mark.parametrize("case", WRITERS)
def test_logits_equal_the_librarys(case: str, tmp_path: Path, start_gang: StartGang) -> None:
    family, write = WRITERS[case]
    source, into = tmp_path / "source", tmp_path / "quantized"
    random_model(tiny_config(family, **(SHAPE if family == "llama" else EXPERTS))).save_pretrained(source)
    words = Tokenizer(WordLevel({str(i): i for i in range(VOCAB_SIZE)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(source)
    sequences = prompts(30, 9, 17)
    with torch.no_grad():
        model = write(source, into).eval()
        expected = [reference_logits(model, tokens) for tokens in sequences]
    for weights in ("widen", "auto"):
        config = EngineConfig(model_dir=into, dtype="float32", weights=weights, block_size=8, num_blocks=12)
        check(step(ModelRunner(config), sequences[:1], [(0, 0, 30)]), [expected[0][-1]])
    for rank in start_gang(2, gang.logits_in_three_steps, into, sequences, "float32"):
        _, prompt_logits, token_logits = rank.result(60)
        check(prompt_logits, [logits[-2] for logits in expected])
        check(token_logits, [logits[-1] for logits in expected])


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
