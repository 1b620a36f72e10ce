"""Weights in GGUF files that were imported as a tensor table."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from core.model.gguf_file import GGML_TYPES, read_table
from core.types.errors import SpecError
from engine.weights.checkpoint import Span
from engine.weights.quantized_weight import E2M1_LEVELS, GGMLWeight, GroupedWeight, QuantizedWeight, pack_4_bits

# H heads, L features of a latent, N unrotated features of a key, V features of a value


_KEYS, _VALUES = ".self_attn.k_b_proj.weight", ".self_attn.v_b_proj.weight"


class GGUFCheckpoint:
    """Implements Checkpoint over memory-mapped GGUF files.

    It joins the two parts of DeepSeek's expansion of latents: keys (H, L, N) and values (H, V, L) are kv_b_proj.
    """

    unindexed = ()

    def __init__(self, model_dir: Path) -> None:
        self._tensors = {tensor.name: tensor for tensor in read_table(model_dir)}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        for keys in [name for name in self.shapes if name.endswith(_KEYS)]:
            num_heads, num_latents, num_keys = self.shapes.pop(keys)
            num_values = self.shapes.pop(keys.replace(_KEYS, _VALUES), (0, 0))[1]
            joined = keys.replace(_KEYS, ".self_attn.kv_b_proj.weight")
            self.shapes[joined] = num_heads * (num_keys + num_values), num_latents
        self._data = {file: _map(Path(file)) for file in sorted({t.file for t in self._tensors.values()})}

    def read(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        if name not in self._tensors:
            return self._joined(name)[slice(*rows or (None,)), slice(*columns or (None,))]
        tensor, blocks = self._tensors[name], self._blocks(name, rows)
        values = blocks.rows(0, len(blocks.blocks_OB)).view(-1, *tensor.shape[1:])
        return values if columns is None else values[:, slice(*columns)]

    def is_quantized(self, name: str) -> bool:
        keys = name.replace(".kv_b_proj.", ".k_b_proj.")
        return GGML_TYPES[self._tensors[name if name in self._tensors else keys].ggml_type].block > 1

    def quantized(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> QuantizedWeight | None:
        if name not in self._tensors:
            return None
        kind = GGML_TYPES[self._tensors[name].ggml_type]
        first, end = columns or (0, self.shapes[name][-1])
        if not self.is_quantized(name) or first % kind.block or end % kind.block:
            return None
        blocks_OB = self._blocks(name, rows).blocks_OB
        first, end = (column // kind.block * kind.num_bytes for column in (first, end))
        weight = GGMLWeight(blocks_OB[:, first:end].contiguous(), kind)
        return _of_mxfp4(weight) if kind.name == "MXFP4" else weight

    def _joined(self, name: str) -> Tensor:
        keys_HNL = self.read(name.replace(".kv_b_proj.", ".k_b_proj.")).transpose(1, 2)
        values_HVL = self.read(name.replace(".kv_b_proj.", ".v_b_proj."))
        return torch.cat((keys_HNL, values_HVL.to(keys_HNL.dtype)), dim=1).flatten(0, 1)

    def _blocks(self, name: str, rows: Span | None) -> GGMLWeight:
        """Return the quantized blocks of these rows. Blocks lie along a row, so rows can be sliced and reordered."""
        tensor = self._tensors[name]
        first, end = rows or (0, tensor.shape[0])
        row_bytes = tensor.num_bytes // tensor.shape[0]
        start = tensor.offset + first * row_bytes
        stored = np.frombuffer(self._data[tensor.file], np.uint8, (end - first) * row_bytes, start)
        blocks_OB = torch.from_numpy(stored).view(end - first, row_bytes)
        if tensor.interleaved_heads:
            blocks_OB = _deinterleave(blocks_OB, head_dim=tensor.shape[0] // tensor.interleaved_heads)
        return GGMLWeight(blocks_OB, GGML_TYPES[tensor.ggml_type])


def _of_mxfp4(weight: GGMLWeight) -> GroupedWeight:
    """Return a matrix in the form that kernels multiply.

    A block is an exponent, then 16 bytes with the codes of inputs i and i + 16.
    """
    blocks_OGB = torch.unflatten(weight.blocks_OB, 1, (-1, weight.kind.num_bytes))
    scales_OG, pairs = blocks_OGB[..., 0].contiguous().view(torch.float8_e8m0fnu), blocks_OGB[..., 1:]
    codes_OI = torch.cat((pairs & 15, pairs >> 4), dim=-1).flatten(1)
    group_I = torch.arange(codes_OI.shape[1]) // weight.kind.block
    return GroupedWeight(pack_4_bits(codes_OI), scales_OG, None, group_I, torch.tensor(E2M1_LEVELS))


def _map(file: Path) -> mmap.mmap:
    try:
        with file.open("rb") as opened:
            # torch requires writable memory.
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise SpecError(f"{file} cannot be read: {error}") from error


def _deinterleave(rows: Tensor, *, head_dim: int) -> Tensor:
    """Undo llama.cpp's interleaved order of rotary rows per head: 0, D/2, 1, D/2 + 1, … -> 0, 1, …, D/2, …"""
    heads = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)
