"""Prefix hashes: identity of a full block of tokens together with all tokens before it.

    h[0] = H(root ‖ tokens[0:S])      h[i] = H(h[i-1] ‖ tokens[i*S:(i+1)*S])      H = blake2b, 16 bytes

`root` is keyed by the model, the adapter and the tenant's salt, so that equal hashes mean equal KV. Hashes are equal in
every process, whatever its hash seed, byte order or machine.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16


def root_hash(model_fingerprint: str, *, adapter: str = "", salt: str = "") -> bytes:
    """Return the 16-byte hash that starts every chain of one (model, adapter, tenant salt)."""
    digest = blake2b(digest_size=HASH_BYTES, person=b"kv-prefix-root")
    for part in (model_fingerprint, adapter, salt):
        encoded = part.encode()
        digest.update(struct.pack("<I", len(encoded)))
        digest.update(encoded)
    return digest.digest()


def checkpoint_hash(prefix_hash: bytes, *, piece: int = 0) -> bytes:
    """Return the 16-byte hash of a piece of this block's checkpoint.

    The checkpoint is the state at the block's end or, if windows are freed, what the block holds in layers with a
    window. Lower tiers store it in block-sized pieces; routers look for the first piece.
    """
    return blake2b(prefix_hash, digest_size=HASH_BYTES, person=b"checkpoint", salt=struct.pack("<Q", piece)).digest()


def expected_hashes(hashes: Sequence[bytes], *, num_tokens: int, block_size: int, num_checkpoints: int) -> list[bytes]:
    """Return the hashes that the index lists once a replica has computed a prompt: its full blocks and checkpoints.

    num_checkpoints: checkpoints that the replica needs to continue; the last one is at the last full block that a
    prompt of the same `num_tokens` could reuse.
    """
    num_reusable = (num_tokens - 1) // block_size
    return [*hashes, *map(checkpoint_hash, hashes[max(0, num_reusable - num_checkpoints) : num_reusable])]


def block_hashes(root: bytes, token_ids: Sequence[int], *, block_size: int, after: int = 0) -> list[bytes]:
    """Hash every full block of `token_ids` after the first `after` blocks, chained from `root`.

    With after > 0, `root` is the hash of block after - 1, so that only the new blocks of a growing sequence are hashed.
    The last, partly filled block has no hash. Returns 16-byte hashes, one per full block.
    """
    num_full = len(token_ids) // block_size
    hashes: list[bytes] = []
    parent = root
    num_new = max(0, num_full - after) * block_size
    packed = struct.pack(f"<{num_new}i", *token_ids[after * block_size : after * block_size + num_new])
    for start in range(0, len(packed), 4 * block_size):
        parent = blake2b(parent + packed[start : start + 4 * block_size], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes
