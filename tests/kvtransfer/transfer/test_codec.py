"""Codec round trips between pools, of KV and of recurrent states; checksums of damaged and reordered payloads."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.model.recurrent import DeltaNetShape, MambaShape, RecurrentShape, ShortConvShape
from engine.kv.checksum import checksum
from engine.kv.layout import KVLayout, head_range
from engine.kv.pool import KVPool
from kvtransfer.protocol.frames import Segment, combine_checksums
from kvtransfer.protocol.plan import can_share, plan_heads
from kvtransfer.transfer.codec import Codec, codec_for

_SEGMENT = Segment(first_layer=1, num_layers=2, first_token=3, num_tokens=21)
_ALL_LAYERS = Segment(first_layer=0, num_layers=4, first_token=0, num_tokens=32)
# Head_dim 64 and three heads in each layer; and unlike layers.
_SHAPES = {"alike": ((3,) * 4, (64,) * 4), "unlike": ((2, 3, 4, 1), (128, 64, 32, 256))}


def _layout(dtype: str, shape: str = "alike") -> KVLayout:
    num_kv_heads, head_dim = _SHAPES[shape]
    return KVLayout(model="m", num_layers=4, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=16, dtype=dtype)


def _last_heads(layout: KVLayout) -> list[range]:
    """Return all heads of each layer but the first."""
    return [range(1, heads.num_heads) for heads in layout.heads]


def _pool(layout: KVLayout) -> KVPool:
    return KVPool(layout, num_blocks=8, device=torch.device("cpu"))


def _filled_pool(layout: KVLayout, slots_T: torch.Tensor) -> KVPool:
    pool = _pool(layout)
    generator = torch.Generator().manual_seed(0)
    for layer in range(layout.num_layers):
        k, v = torch.randn(2, len(slots_T), *layout.heads[layer], generator=generator)
        pool.write(layer, slots_T, k, v)
    return pool


def _ship(
    codec: Codec, source: KVPool, target: KVPool, segment: Segment, heads: list[range], *slots_T: torch.Tensor
) -> torch.Tensor:
    """Pack a segment at the first slots, unpack it at the last ones, and return the payload."""
    payload = torch.full((codec.num_bytes(segment, heads),), 255, dtype=torch.uint8)
    codec.pack(source, segment, heads, slots_T[0], payload)
    codec.unpack(payload, target, segment, heads, slots_T[-1])
    return payload


def _carry(dtype: str, wire: str, shape: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return KV (2, heads, tokens, D) of each layer of the segment, before and after."""
    layout = _layout(dtype, shape)
    from_slots, to_slots = torch.randperm(128)[:21], torch.randperm(128)[:21]
    source, target = _filled_pool(layout, from_slots), _pool(layout)
    _ship(codec_for(layout, wire), source, target, _SEGMENT, _last_heads(layout), from_slots, to_slots)

    def read(pool: KVPool, layer: int, slots: torch.Tensor) -> torch.Tensor:
        return pool.read(layer, torch.arange(8), torch.float32)[..., slots, :]

    assert not any(read(target, layer, to_slots).any() for layer in (0, 3)), "a layer outside the segment was written"
    assert not any(read(target, layer, to_slots)[:, :1].any() for layer in (1, 2)), "a head outside of `heads`, too"
    return [(read(source, i, from_slots)[:, 1:], read(target, i, to_slots)[:, 1:]) for i in _SEGMENT.layers]


_QUANTIZED = ["fp8_e4m3", "int8", "int4"]


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize(
    ("dtype", "wire"),
    [*product(["float32", "bfloat16", "float16", *_QUANTIZED], ["raw"]), *product(_QUANTIZED, _QUANTIZED)],
)
def test_raw_wire_and_quantized_pool_are_bit_exact(dtype: str, wire: str, shape: str) -> None:
    """A quantized pool is not quantized again, for any wire."""
    for before, after in _carry(dtype, wire, shape):
        assert torch.equal(before, after)


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize(("dtype", "wire"), [("int4", "raw"), ("bfloat16", "int4"), ("fp8_e4m3", "raw")])
def test_plain_layers_are_never_quantized(dtype: str, wire: str, shape: str) -> None:
    layout = replace(_layout(dtype, shape), plain_layers=(0, 3), plain_dtype="bfloat16")
    slots, segment, heads = torch.arange(32), _ALL_LAYERS, [range(heads.num_heads) for heads in layout.heads]
    exact = _filled_pool(replace(layout, dtype="bfloat16"), slots)
    source, target = _filled_pool(layout, slots), _pool(layout)
    _ship(codec_for(layout, wire), source, target, segment, heads, slots)
    two_blocks = torch.arange(2)
    for layer in range(4):
        wanted, got = (pool.read(layer, two_blocks, torch.float32) for pool in (exact, target))
        assert torch.equal(wanted, got) == (layer in layout.plain_layers)
    copied = source.copy_out([0, 1])
    assert copied.shape == (2, layout.block_bytes)
    target.copy_in(copied, [5, 6])
    assert torch.equal(target.copy_out([5, 6]), copied)


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wire", _QUANTIZED)
def test_wire_error_is_within_the_quantization_step(dtype: str, wire: str, shape: str) -> None:
    for before, after in _carry(dtype, wire, shape):
        assert not torch.equal(before, after)
        most = before.abs().amax(-1, keepdim=True)
        # e4m3 has 3 bits of mantissa: half a step is 1/16 of the value, and 2^-10 of the row's scale near zero. int8's
        # steps are all one scale. The result is rounded once more, to the pool's dtype.
        bound = {
            "fp8_e4m3": before.abs() / 16 + most / 448 * 2**-9 + 1e-3,
            "int8": most / 127 * 0.51 + most / 256,
            # int4 errs by half a step of the rotated row in each number, and these cancel in most sums.
            "int4": before.norm(dim=-1, keepdim=True) / 20 * (64 / before.shape[-1]) ** 0.5,
        }[wire]
        assert ((before - after).abs() <= bound).all()


@pytest.mark.parametrize(
    ("dtype", "wire", "row_bytes"),
    [
        ("float32", "raw", 80 * 4),
        ("bfloat16", "raw", 80 * 2),
        ("bfloat16", "fp8_e4m3", 64 + 16 * 2 + 2),  # codes, the rotated key in bf16, a scale
        ("float32", "fp8_e4m3", 64 + 16 * 2 + 2),
        ("fp8_e4m3", "fp8_e4m3", 64 + 16 * 2 + 2),
        ("bfloat16", "int8", 64 + 16 * 2 + 2),
        ("int8", "fp8_e4m3", 64 + 16 * 2 + 2),
    ],
)
def test_latent_rows_keep_their_rotated_key(dtype: str, wire: str, row_bytes: int) -> None:
    """There is one row per token and layer, for any number of ranks; in 8 bits its last numbers are sent as bf16."""
    layout = KVLayout(
        model="m", num_layers=4, num_kv_heads=1, head_dim=80, block_size=16, dtype=dtype, num_sides=1, exact_dim=16
    )
    segment, heads = _SEGMENT, [range(1)] * 4
    source, target = _pool(layout), _pool(layout)
    from_slots, to_slots = torch.randperm(128)[:21], torch.randperm(128)[:21]
    rows = torch.randn(4, 21, 80, generator=torch.Generator().manual_seed(0))
    for layer in segment.layers:
        source.write_latents(layer, from_slots, rows[layer])
    payload = _ship(codec_for(layout, wire), source, target, segment, heads, from_slots, to_slots)
    assert payload.numel() == 2 * 21 * row_bytes
    for layer in segment.layers:
        before, after = (
            pool.read(layer, torch.arange(8), torch.float32)[0, 0, slots]
            for pool, slots in ((source, from_slots), (target, to_slots))
        )
        if wire == "raw" or layout.has_scales:
            assert torch.equal(before, after)
        assert torch.equal(after[:, 64:].bfloat16(), rows[layer][:, 64:].bfloat16())
        torch.testing.assert_close(
            after[:, :64], rows[layer][:, :64], atol=0.02 if "int8" in (dtype, wire) else 5e-3, rtol=1 / 14
        )


@pytest.mark.parametrize("wire", ["raw", "int8"])
@pytest.mark.parametrize("ends", [(40,), (5, 16, 31, 40), (32, 40)])
def test_feature_rows_of_full_blocks_are_sent_with_the_last_layer(wire: str, ends: tuple[int, ...]) -> None:
    """Feature rows are sent for full blocks only, in any number of pieces, unchanged on every wire."""
    layout = replace(_layout("float32"), draft="heads", num_draft_layers=1, feature_bytes=12)
    source, target = _pool(layout), _pool(layout)
    source.features.copy_(torch.randint(1, 256, source.features.shape, dtype=torch.uint8))
    codec, sent, received = codec_for(layout, wire), torch.tensor([6, 1, 3]), torch.tensor([0, 7, 2])
    slots_BS = torch.arange(16)
    start, heads = 0, _last_heads(layout)
    for end in ends:
        for layer in range(layout.num_layers):
            segment = replace(_SEGMENT, first_layer=layer, num_layers=1, first_token=start, num_tokens=end - start)
            slots = ((blocks[:, None] * 16 + slots_BS).flatten()[start:end] for blocks in (sent, received))
            _ship(codec, source, target, segment, heads, *slots)
        start = end
    assert torch.equal(target.features[received[:2]], source.features[sent[:2]])
    assert not target.features[[1, 2, 3, 4, 5, 6]].any()


@pytest.mark.parametrize("wire", ["raw", *_QUANTIZED])
def test_payload_has_the_rows_of_each_layer(wire: str) -> None:
    """A layer without heads has none, and a link without heads of the last layer still carries its feature rows."""
    layout = replace(_layout("bfloat16", "unlike"), draft="heads", num_draft_layers=1, feature_bytes=12)
    codec, heads = codec_for(layout, wire), [range(2), range(0), range(1, 4), range(0)]
    row_bytes = {"raw": 2.0, "fp8_e4m3": 1.0, "int8": 1.0, "int4": 0.5}[wire]
    scale_bytes = {"raw": 0, "int4": 4}.get(wire, 2)
    rows = 32 * 2 * (2 * (128 * row_bytes + scale_bytes) + 3 * (32 * row_bytes + scale_bytes))
    assert codec.num_bytes(_ALL_LAYERS, heads) == rows + 2 * 12
    if wire != "raw":  # a pool of that dtype ships as many
        assert codec_for(replace(layout, dtype=wire), "raw").num_bytes(_ALL_LAYERS, heads) == rows + 2 * 12
    assert codec.max_row_bytes() == 2 * max(
        count * (dim * row_bytes + scale_bytes) for count, dim in zip(*_SHAPES["unlike"], strict=True)
    )


@given(st.binary(min_size=1, max_size=100), st.data())
def test_any_damaged_byte_changes_the_checksum(data: bytes, draw: st.DataObject) -> None:
    payload = torch.tensor(list(data), dtype=torch.uint8)
    position = draw.draw(st.integers(0, len(data) - 1))
    damaged = payload.clone()
    damaged[position] ^= draw.draw(st.integers(1, 255))
    assert checksum(payload) != checksum(damaged)


def test_checksums_depend_on_order() -> None:
    payload = torch.arange(16, dtype=torch.uint8)
    assert checksum(payload) != checksum(payload.roll(8))
    assert combine_checksums([1, 2]) != combine_checksums([2, 1])


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
