"""All layers of a model compiled into one program of CPU kernel calls.

At batch size 1 a layer of a small model takes half a millisecond; separate calls from Python added a fifth of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from engine.attention.cpu_heads import StepRows, attention_call, rotary_call
from engine.attention.layer_attention import Angles
from engine.batch.batch import Batch
from engine.cpu.library import Kernels, Program
from engine.cpu.structs import AddNormCall, Call, Kind, ProductCall, RotaryCall, Step
from engine.kv.pool import KVPool
from engine.layers.layers import Before, Linear, RMSNorm, RowParallelLinear
from engine.layers.packed_matrix import PackedMatrix, norm_argument
from engine.model.aux_hidden_states import AuxHiddenStates
from engine.model.decoder_layer import DecoderLayer
from engine.model.gated_mlp import GatedMLP

# Minimum number of positions without logits for which the last layer skips them after its KV.
_WORTH_LEAVING_OUT = 32

# T tokens of the step, C token capacity of the buffers, R positions with logits, I features, E hidden_size,
# N = H + 2 K heads, D head_dim


class CompiledLayers:
    """Layers of a single-rank model whose matrices are all packed. Owned by the step thread."""

    def __init__(self, kernels: Kernels, layers: Sequence[DecoderLayer], pool: KVPool, *, by_tiles: bool) -> None:
        """layers: see can_compile. by_tiles: use AMX for attention, as in CompiledHeads."""
        self._kernels = kernels
        self._layers = layers
        self._pool = pool
        self._by_tiles = by_tiles
        self._most_tokens = min(_packed(part).torch_rows for layer in layers for part in _parts(layer)) - 1
        self._make_room(1)

    def __call__(
        self,
        x_TE: Tensor,
        batch: Batch,
        angles: Angles,
        on_layer: Callable[[int], None] | None,
        aux_hidden_states: AuxHiddenStates | None = None,
        *,
        is_whole: bool,
    ) -> Tensor:
        """Compute all layers from the embedded tokens. The result is valid until the next step.

        Returns all positions (T, E) if `is_whole`, else those with logits (R, E).
        """
        if len(x_TE) > len(self._x_CE):
            self._make_room(1 << (len(x_TE) - 1).bit_length())
        rows, begin = StepRows(batch, angles), 0
        self._x_CE[: len(x_TE)] = x_TE
        if on_layer is not None or aux_hidden_states is not None:
            for layer, (first, end) in enumerate(self._kv_calls):
                if aux_hidden_states is not None and aux_hidden_states.wants(layer):
                    if begin < first:
                        self._program.run(rows.step, first=begin, end=first)
                        begin = first
                    aux_hidden_states.note(layer, self._x_CE[: len(x_TE)].clone())
                if on_layer is not None:
                    self._program.run(rows.step, first=begin, end=end)
                    on_layer(layer)
                    begin = end
        num_skipped = batch.num_tokens - len(batch.logits_rows)
        if aux_hidden_states is None and not is_whole and num_skipped >= _WORTH_LEAVING_OUT:
            end = self._kv_calls[-1][1]
            if begin < end:
                self._program.run(rows.step, first=begin, end=end)
            return self._finish(rows, batch)
        self._program.run(rows.step, first=begin)
        if aux_hidden_states is not None:
            aux_hidden_states.note(len(self._kv_calls), self._x_CE[: len(x_TE)])
        x_TE = self._x_CE[: len(x_TE)]
        return x_TE if is_whole or not num_skipped else x_TE[torch.from_numpy(batch.logits_rows)]

    def _finish(self, rows: StepRows, batch: Batch) -> Tensor:
        """Finish the last layer for positions with logits only; after its KV no other position is needed."""
        num_rows, rows_R = len(batch.logits_rows), torch.from_numpy(batch.logits_rows)
        for values in (self._x_CE, self._heads_of(self._layers[-1])):
            values[:num_rows] = values[rows_R]
        if num_rows:
            self._program.run(rows.of_logits(batch), first=self._kv_calls[-1][1])
        return self._x_CE[:num_rows]

    def is_quickest(self, num_tokens: int) -> bool:
        """Return True unless torch is faster for one of the products; layers are then computed part by part."""
        return num_tokens <= self._most_tokens

    def _make_room(self, num_tokens: int) -> None:
        def room(numbers_of_features: Iterable[int]) -> Tensor:
            return torch.empty(num_tokens, max(numbers_of_features), dtype=torch.bfloat16)

        layers, outputs = self._layers, [_packed(layer.output) for layer in self._layers]
        self._x_CE, self._update_CE = (room(output.num_outputs for output in outputs) for _ in range(2))
        # Layers may differ in their numbers of heads and features.
        self._heads_CI = room(_packed(layer.qkv).num_outputs for layer in layers)
        self._attended_CI = room(output.num_inputs for output in outputs)
        self._gate_up_CI = room(_packed(_mlp(layer).gate_up).num_outputs for layer in layers)
        calls, self._kv_calls = list[Call](), list[tuple[int, int]]()
        for layer in self._layers:
            begin = len(calls)
            calls += self._calls(layer)
            rotation = next(i for i in range(begin, len(calls)) if isinstance(calls[i], RotaryCall))
            # After the rotation the layer's keys and values are in the pool.
            self._kv_calls.append((begin, rotation + 1))
        self._program = Program(self._kernels, calls)

    def _calls(self, layer: DecoderLayer) -> Iterable[Call]:
        mlp = _mlp(layer)
        x_CE, gate_up_CI, heads_CND = self._x_CE, self._gate_up_CI, self._heads_of(layer)
        attended_CI = _leading(self._attended_CI, _packed(layer.output).num_inputs)
        attended_CHD = attended_CI.view(len(x_CE), -1, layer.head_dim)
        q_CHD = heads_CND[:, : attended_CHD.shape[1]]
        yield from _products(layer.qkv, x_CE, heads_CND, before=layer.input_norm)
        yield rotary_call(self._pool, layer.attention, heads_CND)
        yield attention_call(self._pool, layer.attention, q_CHD, attended_CHD, by_tiles=self._by_tiles)
        yield from self._added(layer.output, attended_CHD, None, layer.output_norm)
        yield from _products(mlp.gate_up, x_CE, gate_up_CI, before=layer.mlp_norm)
        yield from self._added(mlp.down, gate_up_CI, mlp.activation, mlp.output_norm)

    def _added(
        self, part: RowParallelLinear, x_CI: Tensor, before: Before | None, after: RMSNorm | None
    ) -> Iterable[Call]:
        """Yield the calls that add after(part(before(x))) to the residual stream."""
        x_CE, update_CE = self._x_CE, self._update_CE
        if after is None:
            yield from _products(part, x_CI, x_CE, before=before, residual_CE=x_CE)
            return
        yield from _products(part, x_CI, update_CE, before=before)
        yield AddNormCall(
            kind=Kind.ADD_NORM,
            norm=norm_argument(after),
            update=update_CE.data_ptr(),
            x=x_CE.data_ptr(),
            features=x_CE.shape[1],
        )

    def _heads_of(self, layer: DecoderLayer) -> Tensor:
        """Return the part of the buffer that holds the heads of a layer, (C, N, D)."""
        heads_CI = _leading(self._heads_CI, _packed(layer.qkv).num_outputs)
        return heads_CI.view(len(heads_CI), -1, layer.head_dim)


class CompiledHead:
    """Final norm and head of a single-rank model with a packed head. Owned by the step thread."""

    def __init__(self, kernels: Kernels, head: Linear, norm: RMSNorm) -> None:
        self._packed = _packed(head)
        nowhere = torch.empty(1, self._packed.num_outputs, dtype=torch.float32)
        self._calls = list(_products(head, torch.empty(0, dtype=torch.bfloat16), nowhere, before=norm))
        self._places = [call.out - nowhere.data_ptr() for call in self._calls]
        self._program = Program(kernels, self._calls)

    def __call__(self, x_RE: Tensor) -> Tensor:
        """Return the logits (R, V) in fp32, rounded to bf16 like the other backends. x_RE: contiguous bf16."""
        logits_RV = torch.empty(len(x_RE), self._packed.num_outputs, dtype=torch.float32)
        for call, place in zip(self._calls, self._places, strict=True):
            call.x, call.out = x_RE.data_ptr(), logits_RV.data_ptr() + place
        self._program.run(Step(tokens=len(x_RE)))
        return logits_RV

    def is_quickest(self, num_rows: int) -> bool:
        return num_rows < self._packed.torch_rows


def can_compile(layers: Sequence[DecoderLayer]) -> bool:
    """Return True if all matrices are packed, no MLP has experts, and norms are where Llama has them."""
    return all(
        isinstance(layer.mlp, GatedMLP)
        and layer.is_usual
        and all(isinstance(part.matrix, PackedMatrix) for part in _parts(layer))
        for layer in layers
    )


def _leading(room_CI: Tensor, num_features: int) -> Tensor:
    """Return the start of a buffer as dense rows of fewer features."""
    return room_CI.flatten()[: len(room_CI) * num_features].view(-1, num_features)


def _parts(layer: DecoderLayer) -> tuple[Linear | RowParallelLinear, ...]:
    mlp = _mlp(layer)
    return layer.qkv, layer.output, mlp.gate_up, mlp.down


def _products(
    part: Linear | RowParallelLinear,
    x_CI: Tensor,
    out_CO: Tensor,
    *,
    before: Before | None = None,
    residual_CE: Tensor | None = None,
) -> Iterable[ProductCall]:
    return _packed(part).calls(x_CI, out_CO, bias_O=part.bias_O, before=before, residual_TO=residual_CE)


def _mlp(layer: DecoderLayer) -> GatedMLP:
    assert isinstance(layer.mlp, GatedMLP)
    return layer.mlp


def _packed(part: Linear | RowParallelLinear) -> PackedMatrix:
    assert isinstance(part.matrix, PackedMatrix)
    return part.matrix
