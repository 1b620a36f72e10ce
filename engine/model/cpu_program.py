"""All layers of a model compiled into one program of CPU kernel calls.

At batch size 1 a layer of a small model takes half a millisecond; separate calls from Python added a fifth of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from engine.attention.cpu_heads import StepRows, attention_call, rotary_call
from engine.cpu.library import Kernels, Program
from engine.cpu.recurrent import can_convolve, can_recur, conv_call, gated_norm_call, recurrence_call
from engine.cpu.structs import AddNormCall, Call, ConvCall, Kind, ProductCall, RecurrenceCall, RotaryCall, Step
from engine.kv.pool import KVPool
from engine.layers.layers import Before, Linear, RMSNorm, RowParallelLinear
from engine.layers.packed_matrix import PackedMatrix, norm_argument
from engine.model.aux_hidden_states import AuxHiddenStates
from engine.model.decoder_layer import DecoderLayer
from engine.model.gated_mlp import GatedMLP
from engine.model.layer_kinds import RecurrentLayer
from engine.model.recurrent_mixers import DeltaNet, ShortConv

# Minimum number of positions without logits at which the last layer skips them after storing its KV or state.
_WORTH_LEAVING_OUT = 32

AnyLayer = DecoderLayer | RecurrentLayer

# T tokens of the step, C token capacity of the buffers, R positions with logits, I features, E hidden_size,
# N = H + 2 K heads, D head_dim, M channels of a convolution, V value features


class CompiledLayers:
    """Layers of a single-rank model whose matrices are all packed. Owned by the step thread."""

    def __init__(self, kernels: Kernels, layers: Sequence[AnyLayer], pool: KVPool, *, by_tiles: bool) -> None:
        """layers: see can_compile. by_tiles: use AMX for attention, as in CompiledHeads."""
        self._kernels = kernels
        self._layers = layers
        self._pool = pool
        self._by_tiles = by_tiles
        self._most_tokens = min(packed(part).torch_rows for layer in layers for part in _parts(layer)) - 1
        self._make_room(1)

    def __call__(
        self,
        x_TE: Tensor,
        rows: StepRows,
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
        batch, begin = rows.batch, 0
        self._x_CE[: len(x_TE)] = x_TE
        if on_layer is not None or aux_hidden_states is not None:
            for layer, (first, end) in zip(self._layers, self._stored_calls, strict=True):
                if aux_hidden_states is not None and aux_hidden_states.wants(layer.index):
                    if begin < first:
                        self._program.run(rows.step, first=begin, end=first)
                        begin = first
                    aux_hidden_states.note(layer.index, self._x_CE[: len(x_TE)].clone())
                if on_layer is not None and isinstance(layer, DecoderLayer) and layer.written is not None:
                    self._program.run(rows.step, first=begin, end=end)
                    on_layer(layer.written)
                    begin = end
        num_skipped = batch.num_tokens - len(batch.logits_rows)
        if aux_hidden_states is None and not is_whole and num_skipped >= _WORTH_LEAVING_OUT:
            end = self._stored_calls[-1][1]
            if begin < end:
                self._program.run(rows.step, first=begin, end=end)
            return self._finish(rows)
        self._program.run(rows.step, first=begin)
        if aux_hidden_states is not None:
            aux_hidden_states.note(len(self._layers), self._x_CE[: len(x_TE)])
        x_TE = self._x_CE[: len(x_TE)]
        return x_TE if is_whole or not num_skipped else x_TE[torch.from_numpy(batch.logits_rows)]

    def _finish(self, rows: StepRows) -> Tensor:
        """Finish the last layer for positions with logits only; others end once the layer's KV or state is stored."""
        last, rows_R = self._layers[-1], torch.from_numpy(rows.batch.logits_rows)
        num_rows = len(rows_R)
        for values in (self._x_CE, self._projected_of(last), self._mixed_of(last)):
            values[:num_rows] = values[rows_R]
        if num_rows:
            self._program.run(rows.of_logits(), first=self._stored_calls[-1][1])
        return self._x_CE[:num_rows]

    def is_quickest(self, num_tokens: int) -> bool:
        """Return True unless torch is faster for one of the products; layers are then computed part by part."""
        return num_tokens <= self._most_tokens

    def _make_room(self, num_tokens: int) -> None:
        def room(numbers_of_features: Iterable[int]) -> Tensor:
            return torch.empty(num_tokens, max(numbers_of_features), dtype=torch.bfloat16)

        layers, outputs = self._layers, [packed(_ends(layer)[1]) for layer in self._layers]
        mixers = (layer.mixer for layer in layers if isinstance(layer, RecurrentLayer))
        nets = [mixer for mixer in mixers if isinstance(mixer, DeltaNet)]
        self._x_CE, self._update_CE = (room(output.num_outputs for output in outputs) for _ in range(2))
        # Layers may differ in their numbers of heads and features.
        self._projected_CI = room(packed(_ends(layer)[0]).num_outputs for layer in layers)
        self._mixed_CI = room(output.num_inputs for output in outputs)
        self._gate_up_CI = room(packed(_mlp(layer).gate_up).num_outputs for layer in layers)
        self._ba_CI = room((0, *(packed(net.ba).num_outputs for net in nets)))
        self._convolved_CM = room((0, *(net.conv_WC.shape[1] for net in nets)))
        calls, self._stored_calls = list[Call](), list[tuple[int, int]]()
        for layer in self._layers:
            begin = len(calls)
            calls += self._calls(layer)
            stores = (
                i for i in range(begin, len(calls)) if isinstance(calls[i], RotaryCall | ConvCall | RecurrenceCall)
            )
            # After these calls the layer's keys and values, or its state, are in the pool.
            self._stored_calls.append((begin, max(stores) + 1))
        self._program = Program(self._kernels, calls)

    def _calls(self, layer: AnyLayer) -> Iterable[Call]:
        mlp, (first, output) = _mlp(layer), _ends(layer)
        yield from products(first, self._x_CE, self._projected_of(layer), before=layer.input_norm)
        if isinstance(layer, DecoderLayer):
            yield from self._attention_calls(layer)
        elif isinstance(layer.mixer, DeltaNet):
            yield from self._delta_net_calls(layer, layer.mixer)
        elif isinstance(layer.mixer, ShortConv):
            yield self._short_conv_call(layer, layer.mixer)
        output_norm = layer.output_norm if isinstance(layer, DecoderLayer) else None
        yield from self._added(output, self._mixed_of(layer), None, output_norm)
        yield from products(mlp.gate_up, self._x_CE, self._gate_up_CI, before=layer.mlp_norm)
        yield from self._added(mlp.down, self._gate_up_CI, mlp.activation, mlp.output_norm)

    def _attention_calls(self, layer: DecoderLayer) -> Iterable[Call]:
        heads_CND, attended_CHD = (
            values_CI.view(len(values_CI), -1, layer.head_dim)
            for values_CI in (self._projected_of(layer), self._mixed_of(layer))
        )
        pool, gates = self._pool, layer.has_gates
        yield rotary_call(pool, layer.attention, heads_CND, has_gates=gates)
        # The queries are first.
        yield attention_call(pool, layer.attention, heads_CND, attended_CHD, by_tiles=self._by_tiles, has_gates=gates)

    def _delta_net_calls(self, layer: RecurrentLayer, net: DeltaNet) -> Iterable[Call]:
        num_channels, num_heads = net.conv_WC.shape[1], net.recurrence.num_heads
        states = self._pool.states[layer.state_layer].tensors
        qkv_CM, z_CI = self._projected_of(layer).tensor_split((num_channels,), dim=1)
        ba_CI, convolved_CM = _leading(self._ba_CI, 2 * num_heads), _leading(self._convolved_CM, num_channels)
        b_CH, a_CH = ba_CI.chunk(2, dim=1)
        mixed_CHV = self._mixed_of(layer).view(len(ba_CI), num_heads, -1)
        yield from products(net.ba, self._x_CE, ba_CI, before=layer.input_norm)
        yield conv_call(qkv_CM, net.conv_WC, None, states.conv_NLC, convolved_CM)
        yield recurrence_call(convolved_CM, a_CH, b_CH, net.recurrence, states.matrix_NHKV, mixed_CHV)
        z_CHV = torch.unflatten(z_CI, 1, mixed_CHV.shape[1:])
        yield gated_norm_call(mixed_CHV, z_CHV, net.norm_1V, net.norm_eps, mixed_CHV, gates_first=False)

    def _short_conv_call(self, layer: RecurrentLayer, conv: ShortConv) -> Call:
        before_CM, after_CM, x_CM = self._projected_of(layer).chunk(3, dim=1)
        return conv_call(
            x_CM,
            conv.conv_WC,
            conv.conv_bias_C,
            self._pool.states[layer.state_layer].tensors.conv_NLC,
            self._mixed_of(layer),
            activates=False,
            gates=(before_CM, after_CM),
        )

    def _added(
        self, part: RowParallelLinear, x_CI: Tensor, before: Before | None, after: RMSNorm | None
    ) -> Iterable[Call]:
        """Yield the calls that add after(part(before(x))) to the residual stream."""
        x_CE, update_CE = self._x_CE, self._update_CE
        if after is None:
            yield from products(part, x_CI, x_CE, before=before, residual_CE=x_CE)
            return
        yield from products(part, x_CI, update_CE, before=before)
        yield AddNormCall(
            kind=Kind.ADD_NORM,
            norm=norm_argument(after),
            update=update_CE.data_ptr(),
            x=x_CE.data_ptr(),
            features=x_CE.shape[1],
        )

    def _projected_of(self, layer: AnyLayer) -> Tensor:
        """Return the outputs of a layer's first matrix, (C, I)."""
        return _leading(self._projected_CI, packed(_ends(layer)[0]).num_outputs)

    def _mixed_of(self, layer: AnyLayer) -> Tensor:
        """Return the inputs of the matrix after a layer's attention or recurrence, (C, I)."""
        return _leading(self._mixed_CI, packed(_ends(layer)[1]).num_inputs)


class CompiledHead:
    """Final norm and head of a single-rank model with a packed head. Owned by the step thread."""

    def __init__(self, kernels: Kernels, head: Linear, norm: RMSNorm) -> None:
        self._packed = packed(head)
        nowhere = torch.empty(1, self._packed.num_outputs, dtype=torch.float32)
        self._calls = list(products(head, torch.empty(0, dtype=torch.bfloat16), nowhere, before=norm))
        self._places = [call.out - nowhere.data_ptr() for call in self._calls]
        self._program = Program(kernels, self._calls)

    def __call__(self, x_RE: Tensor, num_drafted: int = 0) -> Tensor:
        """Return the logits (R, V) in fp32, rounded to bf16 like the other backends. x_RE: contiguous bf16."""
        logits_RV = torch.empty(len(x_RE), self._packed.num_outputs, dtype=torch.float32)
        for call, place in zip(self._calls, self._places, strict=True):
            call.x, call.out = x_RE.data_ptr(), logits_RV.data_ptr() + place
        self._program.run(Step(tokens=len(x_RE), undrafted=len(x_RE) - num_drafted))
        return logits_RV

    def is_quickest(self, num_rows: int) -> bool:
        return num_rows < self._packed.torch_rows


def can_compile(layers: Sequence[object]) -> TypeGuard[Sequence[AnyLayer]]:
    """Return True if all matrices are packed, no MLP has experts, and the kernels support the other parts."""
    return all(
        isinstance(layer, DecoderLayer | RecurrentLayer)
        and isinstance(layer.mlp, GatedMLP)
        and (layer.is_usual if isinstance(layer, DecoderLayer) else _has_kernels(layer))
        and all(isinstance(part.matrix, PackedMatrix) for part in _parts(layer))
        for layer in layers
    )


def _has_kernels(layer: RecurrentLayer) -> bool:
    mixer = layer.mixer
    if layer.residual_scale != 1 or not isinstance(mixer, DeltaNet | ShortConv):
        return False
    return can_convolve(mixer.conv_WC) and (isinstance(mixer, ShortConv) or can_recur(mixer.recurrence))


def _leading(room_CI: Tensor, num_features: int) -> Tensor:
    """Return the start of a buffer as dense rows of fewer features."""
    return room_CI.flatten()[: len(room_CI) * num_features].view(-1, num_features)


def _ends(layer: AnyLayer) -> tuple[Linear, RowParallelLinear]:
    """Return the first matrix of a layer, and the one after its attention or recurrence."""
    if isinstance(layer, DecoderLayer):
        return layer.qkv, layer.output
    mixer = layer.mixer
    return mixer.qkvz if isinstance(mixer, DeltaNet) else mixer.projection, mixer.output


def _parts(layer: AnyLayer) -> tuple[Linear | RowParallelLinear, ...]:
    mlp, parts = _mlp(layer), _ends(layer)
    if isinstance(layer, RecurrentLayer) and isinstance(layer.mixer, DeltaNet):
        return (*parts, layer.mixer.ba, mlp.gate_up, mlp.down)
    return (*parts, mlp.gate_up, mlp.down)


def products(
    part: Linear | RowParallelLinear,
    x_CI: Tensor,
    out_CO: Tensor,
    *,
    before: Before | None = None,
    residual_CE: Tensor | None = None,
) -> Iterable[ProductCall]:
    """Return the calls that write residual + part(before(x)) to `out`."""
    return packed(part).calls(x_CI, out_CO, bias_O=part.bias_O, before=before, residual_TO=residual_CE)


def _mlp(layer: AnyLayer) -> GatedMLP:
    assert isinstance(layer.mlp, GatedMLP)
    return layer.mlp


def packed(part: Linear | RowParallelLinear) -> PackedMatrix:
    assert isinstance(part.matrix, PackedMatrix)
    return part.matrix
