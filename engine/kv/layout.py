"""Shape of KV blocks in one rank's pool, and the fingerprint that both sides of a transfer must share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple

import torch

from core.model.kv_memory import CacheShape
from core.model.recurrent import RecurrentShape
from engine.kernels.quant.hadamard import SIGNS
from engine.kernels.quant.row_quantization import INT4, SCALES

# B blocks; of a layer: K kv heads of this rank, D head_dim; S block_size
#
#   per layer   codes  (B, 2, K, S, D)   2: keys, then values; int4: D / 2 bytes of two codes
#               scales (B, 2, K, S)      8 bits: one bf16 scale per (token, head), for keys and for values; int4: with
#                                        a bf16 zero, as the halves of an int32; see row_quantization.py
#
# One (layer, block) is one contiguous run, and a range of heads of its keys or values is contiguous inside it.
#
# Latent attention (DeepSeek) has one side and one head, which every rank holds: a row per token with its latent and its
# rotated key. In 8-bit pools the latent has a scale, and the rotated key stays in bf16, two codes per number; there are
# no int4 pools of latents:
#
#   bf16   | latent, 512 numbers | rotated key, 64 |      8 bits   | latent, 512 codes | rotated key, 64 of bf16 |
#
# With sparse attention (DeepSeek-V3.2) the rows of layers with an indexer end with the token's index key, 128 numbers,
# which stay in bf16, too.

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": INT4,
}
# Part of the fingerprint with a draft head: a replica that does not ship features is incompatible with one that does.
_WITH_BLOCKS = "features with blocks"
_ALIGNED = 16  # bytes
# Part of the fingerprint with int4: replicas that rotate by other signs are incompatible.
INT4_FORMAT = f"rotated by {SIGNS:x}"


class LayerHeads(NamedTuple):
    """KV heads of one layer on one rank."""

    num_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """KV layout of one model on one rank of `tensor_parallel`.

    `num_kv_heads` counts the whole model. With more ranks than KV heads, each head is held by
    tensor_parallel / num_kv_heads neighbouring ranks. `num_kv_heads`, `head_dim` and `exact_dim` are one number for all
    layers, or one per layer if they differ.
    """

    # Fingerprint of the weights as stored.
    model: str
    num_layers: int
    num_kv_heads: int | tuple[int, ...]
    head_dim: int | tuple[int, ...]
    block_size: int
    # Dtype of the pool, a key of DTYPES.
    dtype: str
    tensor_parallel: int = 1
    # Storage of the weights, one of engine.layers.shards.WEIGHTS: it changes the rounding of products.
    weights: str = "auto"
    # 2: keys and values. 1: one latent row for both.
    num_sides: int = 2
    # Trailing numbers of a row that stay in bf16 in an 8-bit pool.
    exact_dim: int | tuple[int, ...] = 0
    # Fingerprint of the draft heads; empty if no head keeps KV or features.
    draft: str = ""
    # Trailing layers of num_layers that belong to draft heads.
    num_draft_layers: int = 0
    # Layers that neither a pool nor a wire quantizes, and their dtype.
    plain_layers: tuple[int, ...] = ()
    plain_dtype: str = "bfloat16"
    # Widths of the recurrent layers. In transfers the parts of their states are numbered after the layers with KV.
    recurrent_layers: tuple[RecurrentShape, ...] = ()
    # Dtype of the convolution inputs in a state; its matrices are fp32.
    state_dtype: str = "bfloat16"
    # Fingerprint of the bases of quantized keys and values (engine/kv/basis.py); empty: the model's own.
    basis: str = ""
    # Positions that a query sees in each layer, if blocks behind them are freed; 0: all. Empty: nothing is freed.
    windows: tuple[int, ...] = ()
    # Draft-head features of a block's last position, bytes per block; see engine.spec_decode.heads.features.
    feature_bytes: int = 0

    def __post_init__(self) -> None:
        # Equal layouts must have equal fingerprints.
        for name in ("num_kv_heads", "head_dim", "exact_dim"):
            numbers = getattr(self, name)
            if not isinstance(numbers, int):
                assert len(numbers) == self.num_layers, (
                    f"{name} has {len(numbers)} entries for {self.num_layers} layers"
                )
                object.__setattr__(self, name, numbers[0] if len({*numbers}) == 1 else numbers)
        assert len(self.windows) in (0, self.num_layers), f"{len(self.windows)} windows for {self.num_layers} layers"
        if not any(self.windows):
            object.__setattr__(self, "windows", ())

    @property
    def fingerprint(self) -> str:
        """Hash of the facts that both sides of a transfer must share. Excludes tensor parallelism, which may differ."""
        facts = (
            self.model,
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.block_size,
            self.dtype,
            # "auto" and "widen" differ by rounding only; the oldest supported version calls both "as_stored".
            "int8" if self.weights == "int8" else "as_stored",
            self.num_sides,
            self.exact_dim,
            *((self.draft, self.num_draft_layers, self.feature_bytes, _WITH_BLOCKS) if self.draft else ()),
            *((INT4_FORMAT,) if self.dtype == "int4" else ()),
            *((self.plain_layers, self.plain_dtype) if self.plain_layers else ()),
            *((self.recurrent_layers, self.state_dtype) if self.recurrent_layers else ()),
            *(("basis", self.basis) if self.basis else ()),
            *(("windows", self.windows) if self.windows else ()),
        )
        return blake2b(repr(facts).encode(), digest_size=16).hexdigest()

    @cached_property
    def state_parts(self) -> tuple[tuple[int, int], ...]:
        """Parts of each recurrent layer's state: index in `recurrent_layers`, and in RecurrentShape.parts."""
        shapes = self.recurrent_layers
        return tuple((layer, part) for layer, shape in enumerate(shapes) for part in range(len(shape.parts)))

    @cached_property
    def num_units(self) -> tuple[int, ...]:
        """Number of units per transferred layer, divided among ranks: KV heads, or units of one part of a state."""
        return (
            *self.kv_heads,
            *(self.recurrent_layers[layer].parts[part].num_units for layer, part in self.state_parts),
        )

    @property
    def num_transferred(self) -> int:
        """Number of transferred layers: those with KV, then the parts of states."""
        return self.num_layers + len(self.state_parts)

    def state_bytes_of(self, layer: int) -> int:
        """Return the bytes of one layer's state on one rank. layer: index in `recurrent_layers`."""
        number_bytes = DTYPES[self.state_dtype].itemsize
        return self.recurrent_layers[layer].state_bytes(self.tensor_parallel, number_bytes=number_bytes)

    def unit_bytes(self, index: int) -> int:
        """Return the bytes of one unit. index: in `state_parts`."""
        layer, part = self.state_parts[index]
        return self.recurrent_layers[layer].unit_bytes(part, number_bytes=DTYPES[self.state_dtype].itemsize)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state on one rank."""
        return sum(self.state_bytes_of(layer) for layer in range(len(self.recurrent_layers)))

    def slot_bytes_of(self, layer: int) -> int:
        """Return the bytes of one layer's slot, padded so that the matrices of every slot are aligned."""
        return -(-self.state_bytes_of(layer) // _ALIGNED) * _ALIGNED

    @cached_property
    def num_pieces(self) -> int:
        """Number of place-sized pieces in which lower tiers store a block's checkpoint; see BlockManager.

        0 if the model has no checkpoints, or if every layer has a window, because there are no lower tiers then
        (core/spec/kv_windows.py).
        """
        num_bytes = sum(map(self.slot_bytes_of, range(len(self.recurrent_layers)))) or self.window_part_bytes
        return -(-num_bytes // self.place_bytes) if num_bytes and self.place_bytes else 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of all layers but plain ones."""
        return DTYPES[self.dtype]

    @property
    def window(self) -> int:
        """Largest window in tokens, applied to all layers with a window; 0: no layer frees blocks."""
        return max(self.windows, default=0)

    def is_windowed(self, layer: int) -> bool:
        """Return True if the layer keeps only the blocks that later queries see."""
        return bool(self.windows) and self.windows[layer] > 0

    @property
    def draft_layers(self) -> range:
        """Layers of draft heads."""
        return range(self.num_layers - self.num_draft_layers, self.num_layers)

    def dtype_of(self, layer: int) -> torch.dtype:
        return DTYPES[self.plain_dtype] if layer in self.plain_layers else self.torch_dtype

    @property
    def has_scales(self) -> bool:
        return self.torch_dtype in SCALES

    @cached_property
    def kv_heads(self) -> tuple[int, ...]:
        """KV heads of each layer, of the whole model."""
        return _per_layer(self.num_kv_heads, self.num_layers)

    @cached_property
    def heads(self) -> tuple[LayerHeads, ...]:
        """Heads of each layer that a rank holds."""
        counts = (max(1, count // self.tensor_parallel) for count in self.kv_heads)
        dims = _per_layer(self.head_dim, self.num_layers)
        return tuple(LayerHeads(count, dim) for count, dim in zip(counts, dims, strict=True))

    @cached_property
    def exact_dims(self) -> tuple[int, ...]:
        """`exact_dim` of each layer."""
        return _per_layer(self.exact_dim, self.num_layers)

    def row_dim_of(self, layer: int, dtype: torch.dtype) -> int:
        """Return the elements of `dtype` that a layer's row occupies in a pool or payload of that dtype."""
        head_dim = self.heads[layer].head_dim
        if dtype == INT4:
            return head_dim // 2
        return head_dim + self.exact_dims[layer] if dtype in SCALES else head_dim

    def row_bytes_of(self, layer: int, dtype: torch.dtype) -> int:
        """Return the bytes of a layer's row in a pool or payload of `dtype`, scale included."""
        scale = SCALES.get(dtype)
        return self.row_dim_of(layer, dtype) * dtype.itemsize + (scale.itemsize if scale else 0)

    def head_range(self, layer: int, *, rank: int) -> tuple[int, int]:
        """Return the range [start, end) of the model's KV heads of a layer that `rank` holds."""
        return head_range(self.kv_heads[layer], rank=rank, num_ranks=self.tensor_parallel)

    def bytes_per_token(self) -> int:
        """Return the KV bytes of one token on one rank, all layers, scales included."""
        return sum(self._layer_bytes_per_token(layer) for layer in range(self.num_layers))

    def layer_bytes(self, layer: int) -> int:
        """Return the bytes of one layer of one block on one rank, scales included."""
        return self.block_size * self._layer_bytes_per_token(layer)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on one rank: KV of all layers, scales included, and features."""
        return self.cache.block_bytes

    @cached_property
    def cache(self) -> CacheShape:
        """Bytes that one rank caches per token, block and sequence."""
        windowed = filter(self.is_windowed, range(self.num_layers))
        return CacheShape(
            block_size=self.block_size,
            token_bytes=self.bytes_per_token(),
            window_token_bytes=sum(map(self._layer_bytes_per_token, windowed)),
            window=self.window,
            state_bytes=self.state_bytes,
            feature_bytes=self.feature_bytes,
        )

    @property
    def place_bytes(self) -> int:
        """Bytes of a block's place in a lower tier on one rank: `block_bytes` without its part."""
        return self.cache.place_bytes

    @property
    def window_part_bytes(self) -> int:
        """Bytes of the layers with a window in one block on one rank, a part of `block_bytes`."""
        return self.cache.window_part_bytes

    def _layer_bytes_per_token(self, layer: int) -> int:
        return self.num_sides * self.heads[layer].num_heads * self.row_bytes_of(layer, self.dtype_of(layer))


def head_range(num_kv_heads: int, *, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the range [start, end) of KV heads that `rank` of `num_ranks` holds."""
    start = rank * num_kv_heads // num_ranks
    return start, start + max(1, num_kv_heads // num_ranks)


def _per_layer(numbers: int | tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    return (numbers,) * num_layers if isinstance(numbers, int) else numbers
