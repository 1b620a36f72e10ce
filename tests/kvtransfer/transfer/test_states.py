"""Transfer of recurrent states between replicas with different numbers of ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from core.model.recurrent import DeltaNetShape, MambaShape, RecurrentShape, ShortConvShape
from engine.kv.layout import KVLayout, head_range
from engine.kv.pool import KVPool
from kvtransfer.protocol.frames import Segment
from kvtransfer.protocol.plan import can_share, plan_heads
from kvtransfer.transfer.codec import codec_for

_DELTA_NET = DeltaNetShape(
    hidden_size=8,
    num_key_heads=4,
    num_value_heads=12,
    key_dim=5,
    value_dim=3,
    conv_width=4,
    norm_eps=1e-6,
    is_fused=False,
)
# Of four ranks, two share a group.
_MAMBA = MambaShape(
    hidden_size=8, num_heads=8, head_dim=5, num_groups=2, state_dim=3, conv_width=4, norm_eps=1e-6, has_bias=False
)
_LAYOUT = KVLayout(
    model="m",
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    block_size=4,
    dtype="bfloat16",
    recurrent_layers=(_DELTA_NET, ShortConvShape(hidden_size=12, conv_width=3), _MAMBA, _DELTA_NET),
)
_ALL_STATES = Segment(first_layer=2, num_layers=5, first_token=0, num_tokens=9)


def _whole_state(shape: RecurrentShape, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a state of the whole layer: (L, C) and (H, K, V)."""
    generator = torch.Generator().manual_seed(seed)
    conv = torch.randn(shape.conv_shape(), generator=generator).bfloat16()
    return conv, torch.randn(shape.matrix_shape(), generator=generator)


def _fill(pools: list[KVPool], slot: int) -> None:
    """Give each rank its share of one state per layer, as the model splits its layers."""
    for layer, shape in enumerate(_LAYOUT.recurrent_layers):
        (conv, matrix), size = _whole_state(shape, layer), len(pools)
        for rank, pool in enumerate(pools):
            base, columns = 0, list[torch.Tensor]()
            for num_units, unit_channels in shape.parts:
                first, end = head_range(num_units, rank=rank, num_ranks=size)
                for width in unit_channels:
                    columns.append(conv[:, base + first * width : base + end * width])
                    base += num_units * width
            pool.states[layer].tensors.conv_NLC[slot] = torch.cat(columns, dim=1)
            pool.states[layer].tensors.matrix_NHKV[slot] = matrix.chunk(size)[rank] if matrix.numel() else matrix


def _pools(num_ranks: int) -> list[KVPool]:
    layout = replace(_LAYOUT, tensor_parallel=num_ranks)
    return [KVPool(layout, num_blocks=2, device=torch.device("cpu"), num_states=3) for _ in range(num_ranks)]


@pytest.mark.parametrize(("num_senders", "num_receivers"), list(product((1, 2, 4), repeat=2)))
def test_states_arrive_whole_at_other_numbers_of_ranks(num_senders: int, num_receivers: int) -> None:
    senders, receivers, expected = _pools(num_senders), _pools(num_receivers), _pools(num_receivers)
    _fill(senders, 2)
    _fill(expected, 1)
    for copy in plan_heads(sender=senders[0].layout, receiver=receivers[0].layout):
        source, target = senders[copy.sender], receivers[copy.receiver]
        payload = torch.empty(codec_for(source.layout, "raw").num_bytes(_ALL_STATES, copy.sender_heads)).to(torch.uint8)
        codec_for(source.layout, "raw").pack_states(source, _ALL_STATES, copy.sender_heads, 2, payload)
        codec_for(target.layout, "raw").unpack_states(payload, target, _ALL_STATES, copy.receiver_heads, 1)
    for found, wanted in zip(receivers, expected, strict=True):
        for ours, theirs in zip(found.states, wanted.states, strict=True):
            assert all(map(torch.equal, ours.tensors, theirs.tensors))


def test_ranks_must_divide_the_units_of_a_state() -> None:
    assert [size for size in range(1, 9) if can_share(_LAYOUT, size)] == [1, 2, 4]


def test_replicas_with_other_states_are_incompatible() -> None:
    other = replace(_DELTA_NET, value_dim=4)
    assert replace(_LAYOUT, recurrent_layers=(other, *_LAYOUT.recurrent_layers[1:])).fingerprint != _LAYOUT.fingerprint
    assert replace(_LAYOUT, state_dtype="float32").fingerprint != _LAYOUT.fingerprint
