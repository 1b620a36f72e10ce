"""The shape of KV blocks: what one rank's pool holds, and what a sender and a receiver must agree on."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import torch

from engine.kernels.quant.row_quantization import MOST

# B blocks, K kv heads of this rank, S block_size, D head_dim
#
#   per layer   codes  (B, 2, K, S, D)   2: keys, then values
#               scales (B, 2, K, S)      pools of 8 bits only: one bf16 scale per (token, head), for keys and for values
#
# One (layer, block) is one contiguous run, and a range of heads of its keys or values is contiguous inside it.
#
# With latent attention (DeepSeek) there is one side and one head, which every rank holds: a row per token of its latent
# and its rotated key. In 8 bits the latent has a scale, and the rotated key stays in bf16, in place of two codes each:
#
#   bf16   | latent, 512 numbers | rotated key, 64 |      8 bits   | latent, 512 codes | rotated key, 64 of bf16 |

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_WITH_BLOCKS = "features with blocks"  # else: a replica which does not ship them has nothing to do with one that does
EIGHT_BITS = {"fp8": "fp8_e4m3", "int8": "int8"}  # short names, for tables and rows of figures


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """The KV of one model on one rank of `tensor_parallel`.

    `num_kv_heads` is the whole model's. With more ranks than KV heads each head is held by tensor_parallel /
    num_kv_heads neighbouring ranks.
    """

    model: str  # fingerprint of the weights, as they are stored
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str  # of the pool: "bfloat16", "float16", "float32", "fp8_e4m3" or "int8"
    tensor_parallel: int = 1
    weights: str = "as_stored"  # or what they are made into at load; see engine.layers.shards.WEIGHTS
    num_sides: int = 2  # keys and values; 1: one latent row for both
    exact_dim: int = 0  # numbers at the end of a row that stay in bf16 where others have 8 bits
    draft: str = ""  # fingerprint of the heads that draft beside the model; empty: none that keep anything
    num_draft_layers: int = 0  # of num_layers, the last: theirs
    feature_bytes: int = 0  # per block: what heads know of its last position, see engine.spec_decode.heads.features

    @property
    def fingerprint(self) -> str:
        """What both sides of a transfer must share; tensor parallelism may differ, so it is not part of it."""
        facts = (
            self.model,
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.block_size,
            self.dtype,
            self.weights,
            self.num_sides,
            self.exact_dim,
            *((self.draft, self.num_draft_layers, self.feature_bytes, _WITH_BLOCKS) if self.draft else ()),
        )
        return blake2b(repr(facts).encode(), digest_size=16).hexdigest()

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def has_scales(self) -> bool:
        return self.torch_dtype in MOST

    @property
    def heads_per_rank(self) -> int:
        first, end = self.head_range(0)
        return end - first

    @property
    def row_dim(self) -> int:
        """Places of `torch_dtype` that one token's row of one head takes in the pool."""
        return self.head_dim + self.exact_dim if self.has_scales else self.head_dim

    def head_range(self, rank: int) -> tuple[int, int]:
        """The model's kv heads [start, end) that `rank` holds."""
        return head_range(self.num_kv_heads, rank=rank, num_ranks=self.tensor_parallel)

    def bytes_per_token(self) -> int:
        """KV bytes of one token on one rank, all layers, scales included."""
        return self.num_layers * self._layer_bytes_per_token

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block on one rank, scales included."""
        return self.block_size * self._layer_bytes_per_token

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on one rank: KV of all layers, scales included, and the features."""
        return self.block_size * self.bytes_per_token() + self.feature_bytes

    @property
    def _layer_bytes_per_token(self) -> int:
        per_head = self.row_dim * self.torch_dtype.itemsize + (torch.bfloat16.itemsize if self.has_scales else 0)
        return self.num_sides * self.heads_per_rank * per_head


def head_range(num_kv_heads: int, *, rank: int, num_ranks: int) -> tuple[int, int]:
    """The kv heads [start, end) of a model that one of so many ranks holds."""
    start = rank * num_kv_heads // num_ranks
    return start, start + max(1, num_kv_heads // num_ranks)
