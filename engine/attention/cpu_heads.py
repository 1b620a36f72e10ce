"""Attention of a step with the CPU kernels, which read and write the pool's blocks in place."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.attention.attention import AttentionPlans, paged_attention
from engine.attention.heads import in_windows
from engine.attention.layer_attention import Angles, LayerAttention
from engine.batch.batch import Batch
from engine.batch.rows import Ints, Row
from engine.cpu import structs
from engine.cpu.autotune import KERNELS, TILES, TORCH, MeasuredWays
from engine.cpu.library import Kernels, Program
from engine.cpu.structs import AttentionCall, Coding, Kind, PoolView, RotaryCall, Step
from engine.kernels.recurrent.state_slots import StateSlots
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from engine.layers.packed_matrix import norm_argument

# T tokens, H query heads and K kv heads of this rank, N = H + 2 K, D head_dim, F half of its rotated part

# Queries per row; with fewer, gathering the keys does not pay.
_LONG = 64
# Queries of the measured row, and its context length.
_MEASURED = (512, 2048)


class CompiledHeads:
    """Implements engine.attention.heads.Heads with the C++ kernels: bf16, over a pool of bf16 or codes.

    A query's result depends only on its own tokens, not on the batch or on how its prompt was chunked. With AMX, rows
    with many queries match this only within rounding.
    """

    def __init__(
        self,
        kernels: Kernels,
        batch: Batch,
        pool: KVPool,
        angles: Angles,
        *,
        by_tiles: bool = False,
        has_windows: bool = True,
    ) -> None:
        """by_tiles: use AMX where possible. has_windows: False if no computed layer frees blocks."""
        self._kernels = kernels
        self._pool = pool
        self._by_tiles = by_tiles
        self._rows = StepRows(batch, angles, windowed=in_windows(batch, pool) if has_windows else None)

    def store(self, attention: LayerAttention, heads_TND: Tensor) -> Tensor:
        rotation = rotary_call(self._pool, attention, heads_TND)
        Program(self._kernels, [rotation]).run(self._rows.step)
        return heads_TND[:, : rotation.q_heads]

    def attend(self, attention: LayerAttention, q_THD: Tensor) -> Tensor:
        out_THD = torch.empty(q_THD.shape, dtype=torch.bfloat16)
        self._attend(attention, q_THD, out_THD, self._rows.step)
        return out_THD

    def _attend(self, attention: LayerAttention, q_THD: Tensor, out_THD: Tensor, step: Step) -> None:
        call = attention_call(self._pool, attention, q_THD, out_THD, by_tiles=self._by_tiles)
        Program(self._kernels, [call]).run(step)


class SharedHeads(CompiledHeads):
    """CompiledHeads that leaves the long rows at the batch's end to torch, over gathered keys.

    Results of long rows depend on how the prompt was chunked, within rounding.
    """

    def __init__(self, kernels: Kernels, batch: Batch, pool: KVPool, angles: Angles) -> None:
        super().__init__(kernels, batch, pool, angles)
        num_rows, num_long = len(batch.query_lens), num_long_rows(batch)
        long_rows = range(num_rows - num_long, num_rows)
        self._plans = AttentionPlans(batch, pool, dtype=torch.bfloat16, rows=long_rows)
        self._window_plans = self._plans
        if windowed := self._rows.windowed:
            self._window_plans = AttentionPlans(windowed, pool, dtype=torch.bfloat16, rows=long_rows)
        self._before = self._rows.first(num_rows - num_long)

    def attend(self, attention: LayerAttention, q_THD: Tensor) -> Tensor:
        if attention.soft_cap is not None or attention.sinks_H is not None:
            # Torch has no fused attention for these.
            return super().attend(attention, q_THD)
        plans = self._window_plans if self._pool.layout.is_windowed(attention.layer) else self._plans
        out_THD = paged_attention(q_THD, self._pool, attention, plans.of(attention))
        if num_tokens := self._before.tokens:
            self._attend(attention, q_THD[:num_tokens], out_THD[:num_tokens], self._before)
        return out_THD


def num_long_rows(batch: Batch) -> int:
    """Count the long rows at the batch's end. Prompts follow the decoding sequences."""
    short = np.flatnonzero(batch.query_lens < _LONG)
    return len(batch.query_lens) - (int(short[-1]) + 1 if len(short) else 0)


def quickest_way(kernels: Kernels, layout: KVLayout, num_heads: int, measured: MeasuredWays) -> str:
    """Return the fastest way to attend to long rows on this machine: KERNELS, TILES or TORCH.

    Measures the first layer's heads.
    """
    num_queries, context = _MEASURED
    num_kv_heads, dim = layout.heads[0]
    pool = KVPool(
        replace(layout, num_layers=1, num_kv_heads=layout.kv_heads[0], head_dim=dim, plain_layers=(), windows=()),
        num_blocks=-(-context // layout.block_size),
        device=torch.device("cpu"),
    )
    row = Row([0] * num_queries, start=context - num_queries, blocks=range(pool.num_blocks), num_logits=0)
    batch = Batch.of([row], block_size=layout.block_size)
    angles = [(torch.ones(num_queries, 1, dim // 2),) * 2]
    heads: dict[str, CompiledHeads] = {KERNELS: CompiledHeads(kernels, batch, pool, angles)}
    if kernels.has_tiles:
        heads[TILES] = CompiledHeads(kernels, batch, pool, angles, by_tiles=True)
    heads[TORCH] = SharedHeads(kernels, batch, pool, angles)
    attention = LayerAttention(layer=0, scale=dim**-0.5)
    q_THD = torch.ones(num_queries, num_heads, dim, dtype=torch.bfloat16)
    workload = f"ATTEND {num_queries} of {context}, {num_heads} heads on {num_kv_heads} of {dim}, {layout.dtype}"
    ways = {way: partial(backend.attend, attention, q_THD) for way, backend in heads.items()}
    return measured.quickest(workload, ways)


class StepAngles:
    """Angles in the kernels' format; owns their memory."""

    def __init__(self, angles: Angles) -> None:
        self._kept = [(cos_T1F.contiguous(), sin_T1F.contiguous()) for cos_T1F, sin_T1F in angles]
        views = (structs.Angles(cos.data_ptr(), sin.data_ptr(), cos.shape[-1]) for cos, sin in self._kept)
        self._views = (structs.Angles * len(angles))(*views)
        self.address = ctypes.addressof(self._views)


class StepRows:
    """Batch in the kernels' format; owns the memory that `step` points to."""

    def __init__(
        self, batch: Batch, angles: Angles, states: StateSlots | None = None, windowed: Batch | None = None
    ) -> None:
        """states: None if the model has none. windowed: the batch in layers with a window, if they free blocks."""
        self.batch = batch
        self.windowed = windowed
        # May be a view of a wider array.
        self._tables = batch.block_tables
        self._arrays = [np.ascontiguousarray(a) for a in (batch.slots, batch.query_lens, batch.context_lens)]
        self._angles = StepAngles(angles)
        self._states = states
        slots, query_lens, context_lens = (array.ctypes.data for array in self._arrays)
        self.step = Step(
            tokens=batch.num_tokens,
            undrafted=batch.num_tokens - batch.num_drafted,
            sequences=len(batch.query_lens),
            table_width=self._tables.strides[0] // self._tables.itemsize,
            slots=slots,
            angles=self._angles.address,
            tables=self._tables.ctypes.data,
            query_lens=query_lens,
            context_lens=context_lens,
            state_reads=None if states is None else states.read_S.data_ptr(),
            state_writes=None if states is None else states.write_T.data_ptr(),
        )
        if windowed:
            self._window_arrays = [np.ascontiguousarray(a) for a in (windowed.slots, windowed.block_tables)]
            self.step.window_slots, self.step.window_tables = (array.ctypes.data for array in self._window_arrays)
            self.step.window_width = windowed.block_tables.shape[1]

    def first(self, num_rows: int) -> Step:
        """Return the step of the first `num_rows` rows. Valid as long as this object."""
        step = Step.from_buffer_copy(self.step)
        step.sequences, step.tokens = num_rows, int(self._arrays[1][:num_rows].sum())
        return step

    def of_logits(self) -> Step:
        """Return the step of the positions with logits, the last ones of each row, for calls after `store`.

        Valid until the next call, and as long as this object.
        """
        batch, with_logits = self.batch, np.flatnonzero(self.batch.num_logits)
        arrays = batch.block_tables, batch.num_logits, batch.context_lens
        self._logits_arrays = [np.ascontiguousarray(array[with_logits]) for array in arrays]
        tables, query_lens, context_lens = (array.ctypes.data for array in self._logits_arrays)
        step = Step(
            tokens=len(batch.logits_rows),
            undrafted=len(with_logits),
            sequences=len(with_logits),
            table_width=batch.block_tables.shape[1],
            tables=tables,
            query_lens=query_lens,
            context_lens=context_lens,
        )
        if self.windowed:
            self._logits_arrays.append(np.ascontiguousarray(self.windowed.block_tables[with_logits]))
            step.window_tables, step.window_width = self._logits_arrays[-1].ctypes.data, self.step.window_width
        return step


def store_kv(
    kernels: Kernels,
    pool: KVPool,
    attention: LayerAttention,
    slots_T: Ints,
    kv_TND: Tensor,
    cos_T1F: Tensor,
    sin_T1F: Tensor,
) -> None:
    """Rotate keys in place and write keys and values to the pool. kv_TND: keys and values only, N = 2 K."""
    slots_T, angles = np.ascontiguousarray(slots_T), StepAngles([(cos_T1F, sin_T1F)])
    step = Step(tokens=len(slots_T), slots=slots_T.ctypes.data, angles=angles.address)
    Program(kernels, [rotary_call(pool, attention, kv_TND)]).run(step)


def rotary_call(pool: KVPool, attention: LayerAttention, heads_TND: Tensor, *, has_gates: bool = False) -> RotaryCall:
    """Build the call that norms and rotates queries and keys in place and writes keys and values to the pool.

    has_gates: each query is followed by its gate.
    """
    view = _view(pool, attention.layer)
    call = RotaryCall(
        kind=Kind.ROTATE,
        pool=view,
        heads=heads_TND.data_ptr(),
        q_heads=(heads_TND.shape[1] - (2 * view.kv_heads if attention.stores else 0)) // (1 + has_gates),
        rope=attention.rope,
        stores=attention.stores,
        has_gates=has_gates,
    )
    if attention.q_norm is not None:
        call.q_norm = norm_argument(attention.q_norm)
    if attention.k_norm is not None:
        call.k_norm = norm_argument(attention.k_norm)
    if attention.v_norm is not None:
        call.v_norm = norm_argument(attention.v_norm)
    if (basis := attention.basis) is not None:
        call.basis = structs.Basis(*(matrix_KDD.data_ptr() for matrix_KDD in basis))
    return call


def attention_call(
    pool: KVPool,
    attention: LayerAttention,
    q_THD: Tensor,
    out_THD: Tensor,
    *,
    by_tiles: bool = False,
    has_gates: bool = False,
) -> AttentionCall:
    """Build the attention call. q_THD may be a view of wider rows; out_THD is contiguous.

    has_gates: each query in q_THD is followed by its gate, whose sigmoid multiplies the output.
    """
    basis = attention.basis
    return AttentionCall(
        kind=Kind.ATTEND,
        pool=_view(pool, attention.layer),
        q=q_THD.data_ptr(),
        q_stride=q_THD.stride(0),
        has_gates=has_gates,
        out=out_THD.data_ptr(),
        q_heads=out_THD.shape[1],
        scale=attention.scale,
        soft_cap=attention.soft_cap or 0.0,
        sinks=None if attention.sinks_H is None else attention.sinks_H.data_ptr(),
        window=attention.window or 0,
        chunk=attention.chunk or 0,
        by_tiles=by_tiles,
        output_basis=None if basis is None else basis.outputs.data_ptr(),
    )


def _view(pool: KVPool, layer: int) -> PoolView:
    layout, (codes, scales) = pool.layout, pool.layer(layer)
    return PoolView(
        codes=codes.data_ptr(),
        scales=None if scales is None else scales.data_ptr(),
        coding=Coding.of(codes.dtype),
        is_windowed=layout.is_windowed(layer),
        kv_heads=layout.heads[layer].num_heads,
        block_size=layout.block_size,
        head_dim=layout.heads[layer].head_dim,
    )
