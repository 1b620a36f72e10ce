"""Quantized checkpoints in published formats, written from the formats' definitions, not with our code.

Each quantizer takes a matrix (O, I) fp32. It returns the tensors by suffix, and the values that they represent.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from engine.weights.open_checkpoint import open_checkpoint
from engine.weights.quantized_weight import GroupedWeight, ScaledColumns

Quantised = tuple[dict[str, Tensor], Tensor]

GROUP = 16
BLOCK = (32, 16)
# Inside and on the borders of groups, bytes, words and blocks; single rows and columns.
SLICES = [((5, 50), (7, 90)), (None, (48, 96)), ((32, 64), None), ((0, 1), (31, 32)), ((63, 64), (0, 95))]


def fp8_blocks(w: Tensor) -> Quantised:
    """DeepSeek's: w ~ codes * weight_scale_inv of the block; edge blocks may be smaller."""
    codes, numbers = torch.empty_like(w).to(torch.float8_e4m3fn), torch.empty_like(w)
    scales = torch.empty(-(-w.shape[0] // BLOCK[0]), -(-w.shape[1] // BLOCK[1]))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
            scales[i, j] = w[block].abs().max() / 448
            codes[block] = (w[block] / scales[i, j]).to(torch.float8_e4m3fn)
            numbers[block] = codes[block].float() * scales[i, j]
    return {"weight": codes, "weight_scale_inv": scales}, numbers


def fp8_channels(w: Tensor) -> Quantised:
    scale = w.abs().amax(1, keepdim=True) / 448
    codes = (w / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(1)}, codes.float() * scale


def fp8_tensor(w: Tensor) -> Quantised:
    scale = w.abs().max() / 448
    codes = (w / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def int8_channels(w: Tensor) -> Quantised:
    scale = w.abs().amax(1, keepdim=True) / 127
    codes = (w / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def awq(w: Tensor) -> Quantised:
    """AutoAWQ, version gemm: packed along the outputs; nibble i holds output (0, 2, 4, 6, 1, 3, 5, 7)[i] of eight."""
    codes, zeros, scales, numbers = _asymmetric(w, torch.arange(w.shape[1]) // GROUP)

    def pack(x: Tensor) -> Tensor:
        packed = torch.zeros(x.shape[0], x.shape[1] // 8, dtype=torch.int64)
        for nibble, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            packed |= x[:, output::8].long() << (4 * nibble)
        return _as_int32(packed)

    return {"qweight": pack(codes.T), "qzeros": pack(zeros.T), "scales": scales.T.contiguous().half()}, numbers


def gptq(w: Tensor, *, stored_less: int = 1) -> Quantised:
    """AutoGPTQ with desc_act: packed along the inputs, whose groups come in any order; zeros are stored less one."""
    group = (torch.arange(w.shape[1]) // GROUP)[torch.randperm(w.shape[1], generator=torch.Generator().manual_seed(0))]
    codes, zeros, scales, numbers = _asymmetric(w, group)

    def pack(x: Tensor) -> Tensor:
        """Pack along the first dimension."""
        packed = torch.zeros(x.shape[0] // 8, x.shape[1], dtype=torch.int64)
        for nibble in range(8):
            packed |= x[nibble::8].long() << (4 * nibble)
        return _as_int32(packed)

    zeros = pack((zeros - stored_less) % 16).T.contiguous()
    tensors = {"qweight": pack(codes.T), "qzeros": zeros, "scales": scales.T.contiguous().half()}
    return tensors | {"g_idx": group.int()}, numbers


def gptq_v2(w: Tensor) -> Quantised:
    return gptq(w, stored_less=0)


def int4_packed(w: Tensor) -> Quantised:
    """compressed-tensors, pack-quantized: eight codes per word from the low end, eight more than their numbers."""
    groups = w.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2) / 7).bfloat16()
    codes = (groups / scales.float().unsqueeze(2)).round().clamp(-8, 7)
    words = torch.zeros(w.shape[0], w.shape[1] // 8, dtype=torch.int64)
    for nibble in range(8):
        words |= (codes.flatten(1)[:, nibble::8].long() + 8) << (4 * nibble)
    parts = {"weight_packed": _as_int32(words), "weight_scale": scales, "weight_shape": torch.tensor(w.shape)}
    return parts, (codes * scales.float().unsqueeze(2)).flatten(1)


def nf4(w: Tensor) -> Quantised:
    """bitsandbytes, 4 bits: blocks of 64 codes through all rows, the first code of a byte in the high half."""
    levels = torch.linspace(-1, 1, 16)
    blocks = w.flatten().view(-1, 64)
    scales = blocks.abs().amax(1)
    codes = ((blocks / scales.unsqueeze(1)).unsqueeze(-1) - levels).abs().argmin(-1)
    pairs = codes.flatten().to(torch.uint8)
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(w.shape)})
    parts = {
        "weight": (pairs[::2] << 4 | pairs[1::2]).unsqueeze(1),
        "weight.absmax": scales,
        "weight.quant_map": levels,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state.encode()), dtype=torch.uint8),
    }
    return parts, (levels[codes] * scales.unsqueeze(1)).view_as(w)


def mxfp4_blocks(w: Tensor) -> Quantised:
    """OpenAI's MXFP4 of one expert: 16 bytes per block of 32 inputs, and one power of two."""
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    levels = torch.cat((levels, -levels))
    blocks = w.unflatten(1, (-1, 32))
    powers = (blocks.abs().amax(2) / 6).log2().ceil()
    codes = ((blocks / powers.exp2().unsqueeze(2)).unsqueeze(-1) - levels).abs().argmin(-1)
    pairs = codes.to(torch.uint8)
    parts = {"blocks": pairs[..., ::2] | pairs[..., 1::2] << 4, "scales": (powers + 127).to(torch.uint8)}
    return parts, (levels[codes] * powers.exp2().unsqueeze(2)).flatten(1)


FORMATS: dict[str, tuple[Callable[[Tensor], Quantised], dict[str, Any]]] = {
    "fp8 blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": list(BLOCK)}),
    "fp8 channels": (fp8_channels, {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    "fp8 tensor": (fp8_tensor, {"quant_method": "fp8"}),
    "int8 channels": (int8_channels, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "gptq_v2": (gptq_v2, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}),
}


def write_quantised(directory: Path, model: PreTrainedModel, kind: str) -> None:
    """Write the model with quantized layer matrices, and round the model itself to the stored values."""
    quantise, description = FORMATS[kind]
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    parameters = dict(model.named_parameters())
    for name in [n for n in tensors if ".layers." in n and n.endswith("_proj.weight")]:
        parts, numbers = quantise(tensors.pop(name).float())
        stem = name.removesuffix("weight")
        tensors |= {stem + suffix: part.contiguous() for suffix, part in parts.items()}
        parameters[name].data = numbers
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": description}))


def check_numbers(
    directory: Path,
    tensors: dict[str, Tensor],
    expected: Tensor,
    config: dict[str, object],
    *,
    key: str = "quantization_config",
) -> None:
    """Check whole matrices, slices of them, and the memory that they need.

    expected: all rows of all matrices. key: of the settings in config.json.
    """
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({key: config}))
    checkpoint, held = open_checkpoint(directory), 0
    names = [name for name in sorted(checkpoint.shapes) if name.endswith(".weight")]
    for name, numbers in zip(names, expected.chunk(len(names)), strict=True):
        assert checkpoint.shapes[name] == numbers.shape
        torch.testing.assert_close(checkpoint.read(name), numbers, atol=1e-6, rtol=1e-5)
        for rows, columns in SLICES:
            part = numbers[slice(*rows or (None,)), slice(*columns or (None,))]
            kept = checkpoint.quantized(name, rows=rows, columns=columns)
            assert kept is not None and kept.shape == part.shape
            torch.testing.assert_close(kept.rows(0, len(part)), part, atol=1e-6, rtol=1e-5)
        kept = checkpoint.quantized(name)
        kept = kept.weight if isinstance(kept, ScaledColumns) else kept
        assert isinstance(kept, GroupedWeight)
        # A repeated zero takes no memory.
        parts = (part for part in (kept.codes, kept.scales_OG, kept.zeros_OG) if part is not None and part.stride(0))
        held += sum(part.nbytes for part in parts)
    if config.get("bits") not in (2, 3, 5) and "pack-quantized" not in str(config.get("format")):
        assert held <= 1.1 * sum(tensor.nbytes for tensor in tensors.values())


def _asymmetric(w: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes (O, I), zeros and scales (O, G), and the values that they represent; scales are rounded to fp16."""
    num_groups = int(group.max()) + 1
    low = torch.stack([w[:, group == g].amin(1) for g in range(num_groups)], 1).clamp(max=0)
    high = torch.stack([w[:, group == g].amax(1) for g in range(num_groups)], 1).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(1, 15)
    codes = (w / scales[:, group] + zeros[:, group]).round().clamp(0, 15)
    return codes.to(torch.uint8), zeros.long(), scales, (codes - zeros[:, group]) * scales[:, group]


def _as_int32(packed: Tensor) -> Tensor:
    return packed.where(packed < 1 << 31, packed - (1 << 32)).to(torch.int32).contiguous()
