"""EAGLE-3 layer in CPU kernels for few tokens, as three programs: features, keys and values, and a draft token.

For few tokens the Python code between the products would take as long as the products.

The layer reads two rows side by side, each with its own norm. Here its matrix is split in two, one per row, so that the
rows need not be concatenated.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention.cpu_heads import StepAngles, attention_call, rotary_call
from engine.attention.layer_attention import LayerAttention
from engine.batch.rows import Ints
from engine.cpu.library import Kernels, Program
from engine.cpu.structs import Angles, ProductCall, Step
from engine.kv.pool import KVPool
from engine.layers.layers import Linear, RMSNorm, RowParallelLinear
from engine.layers.packed_matrix import PackedMatrix
from engine.model.cpu_program import packed, products
from engine.model.gated_mlp import GatedMLP
from engine.spec_decode.heads.draft_layer import DraftPlaces

# N tokens, C capacity in tokens, P places of a draft, R rows, E hidden_size, M kv heads (keys and values), H query
# heads, D draft vocabulary (of heads: head_dim), F half of a head's rotated part, W hidden states read, I features

# Tokens per call; beyond this the Python overhead no longer matters.
_MOST = 64


@dataclass(frozen=True, kw_only=True)
class EagleParts:
    """Modules of the layer. In a pair, one matrix reads the token's embedding, the other the previous feature."""

    fuse: Linear
    embedding_norm: RMSNorm
    feature_norm: RMSNorm | None  # None: the caller has applied it
    kv: tuple[Linear, Linear]
    qkv: tuple[Linear, Linear]
    output: RowParallelLinear
    mlp_norm: RMSNorm
    mlp: GatedMLP
    norm: RMSNorm
    head: Linear

    @property
    def products(self) -> list[Linear | RowParallelLinear]:
        return [*self.kv, *self.qkv, self.fuse, self.output, self.mlp.gate_up, self.mlp.down, self.head]


class CompiledEagle:
    """EAGLE-3 layer in CPU kernels. Owned by the step thread."""

    def __init__(
        self, kernels: Kernels, parts: EagleParts, pool: KVPool, attention: LayerAttention, *, dim: int
    ) -> None:
        """dim: head_dim. All matrices are packed."""
        self._pool = pool
        self.most_tokens = min(_MOST, *(packed(part).torch_rows - 1 for part in parts.products))

        def room(num_features: int) -> Tensor:
            return torch.zeros(self.most_tokens, num_features, dtype=torch.bfloat16)

        hidden = packed(parts.output).num_outputs
        self._embedded_CE, self._x_CE = room(hidden), room(hidden)
        self._hidden_CW = room(packed(parts.fuse).num_inputs)
        self._fused_CE = room(hidden)
        self._kv_CMD = torch.unflatten(room(packed(parts.kv[0]).num_outputs), -1, (-1, dim))
        self._heads_CND = torch.unflatten(room(packed(parts.qkv[0]).num_outputs), -1, (-1, dim))
        self._attended_CHD = torch.unflatten(room(packed(parts.output).num_inputs), -1, (-1, dim))
        self._gate_up_CI = room(packed(parts.mlp.gate_up).num_outputs)
        self._logits_CD = room(packed(parts.head).num_outputs)
        heads, attended, x, gate_up = self._heads_CND, self._attended_CHD, self._x_CE, self._gate_up_CI
        self._fuse = Program(kernels, [*products(parts.fuse, self._hidden_CW, self._fused_CE)])
        self._put = Program(
            kernels, [*self._entry(parts, parts.kv, self._kv_CMD), rotary_call(pool, attention, self._kv_CMD)]
        )
        self._draft = Program(
            kernels,
            [
                *self._entry(parts, parts.qkv, heads),
                rotary_call(pool, attention, heads),
                attention_call(pool, attention, heads[:, : attended.shape[1]], attended),
                *products(parts.output, attended, x, residual_CE=x),
                *products(parts.mlp.gate_up, x, gate_up, before=parts.mlp_norm),
                *products(parts.mlp.down, gate_up, x, before=parts.mlp.activation, residual_CE=x),
                *products(parts.head, x, self._logits_CD, before=parts.norm),
            ],
        )

    def fuse(self, hidden_NW: Tensor) -> Tensor:
        """Return the fused features (N, E), valid until the next call."""
        num_tokens = len(hidden_NW)
        self._hidden_CW[:num_tokens] = hidden_NW
        self._fuse.run(Step(tokens=num_tokens, undrafted=num_tokens))
        return self._fused_CE[:num_tokens]

    def put(self, embedded_NE: Tensor, before_NE: Tensor, slots_N: Ints, cos_N1F: Tensor, sin_N1F: Tensor) -> None:
        """Write the keys and values of entries to the pool."""
        num_tokens = len(embedded_NE)
        self._embedded_CE[:num_tokens], self._x_CE[:num_tokens] = embedded_NE, before_NE
        slots_N, angles = np.ascontiguousarray(slots_N), StepAngles([(cos_N1F, sin_N1F)])
        self._put.run(Step(tokens=num_tokens, undrafted=num_tokens, slots=slots_N.ctypes.data, angles=angles.address))

    def draft(self, step: Step, embedded_RE: Tensor, before_RE: Tensor) -> tuple[Tensor, Tensor]:
        """Draft the token after one entry of each row (see eagle.py). Returns its features (R, E) and logits (R, D).

        Both are bf16 and valid until the next call, which may take these features as input. step: from EntrySteps.
        before: features of the previous positions.
        """
        num_rows = len(embedded_RE)
        self._embedded_CE[:num_rows] = embedded_RE
        if before_RE.data_ptr() != self._x_CE.data_ptr():
            self._x_CE[:num_rows] = before_RE
        self._draft.run(step)
        return self._x_CE[:num_rows], self._logits_CD[:num_rows]

    def _entry(self, parts: EagleParts, halves: tuple[Linear, Linear], out_CO: Tensor) -> Iterable[ProductCall]:
        yield from products(halves[0], self._embedded_CE, out_CO, before=parts.embedding_norm)
        yield from products(halves[1], self._x_CE, out_CO, before=parts.feature_norm, residual_CE=out_CO)


class EntrySteps:
    """Kernel arguments of a draft's entries, place by place. Owns the arrays that the steps point to."""

    def __init__(self, places: DraftPlaces, cos_N1F: Tensor, sin_N1F: Tensor) -> None:
        """cos, sin: for all places, concatenated."""
        tables_RB, slots_PR = places.tables_RB, places.slots_PR
        context_lens_PR, ones_R = places.positions_PR + 1, np.ones(len(tables_RB), dtype=np.int64)
        self._kept = tables_RB, slots_PR, context_lens_PR, ones_R, cos_N1F, sin_N1F
        self._first = slots_PR.ctypes.data, context_lens_PR.ctypes.data, cos_N1F.data_ptr(), sin_N1F.data_ptr()
        angles = cos_N1F[: len(tables_RB)].nbytes
        self._bytes = slots_PR.strides[0], context_lens_PR.strides[0], angles, angles
        self._angles = Angles(pairs=cos_N1F.shape[-1])
        self._step = Step(
            tokens=len(tables_RB),
            angles=ctypes.addressof(self._angles),
            sequences=len(tables_RB),
            table_width=tables_RB.shape[1],
            tables=tables_RB.ctypes.data,
            query_lens=ones_R.ctypes.data,
        )

    def at(self, place: int) -> Step:
        """Return the step of this place, valid until the next call."""
        step, angles = self._step, self._angles
        addresses = [first + place * size for first, size in zip(self._first, self._bytes, strict=True)]
        step.slots, step.context_lens, angles.cos, angles.sin = addresses
        return step


def can_compile(parts: EagleParts) -> bool:
    return all(isinstance(part.matrix, PackedMatrix) for part in parts.products)
