"""Prefix hashes of a trace's requests, made from the trace's block ids instead of tokens."""

from __future__ import annotations

from core.trace.trace import TOKENS_PER_ID, TraceRequest
from core.types.errors import SpecError
from core.types.prefix_hash import HASH_BYTES

_MIX = 0x9E3779B97F4A7C15F39CC0605CEDC835  # odd multiplier; spreads consecutive ids over all bits of a hash


class PrefixHashes:
    """Cache of prefix hashes by trace id. An id already identifies its whole prefix, so hashes are not chained."""

    def __init__(self, block_size: int, tokens_per_id: int = TOKENS_PER_ID) -> None:
        """Raises SpecError unless `block_size` divides the trace's blocks of `tokens_per_id`."""
        if tokens_per_id % block_size:
            raise SpecError(f"block size {block_size} does not divide the {tokens_per_id} tokens of the trace's blocks")
        self._block_size = block_size
        self._tokens_per_id = tokens_per_id
        self._blocks_per_id = tokens_per_id // block_size
        self._of_id: dict[int, list[bytes]] = {}

    def of(self, request: TraceRequest) -> list[bytes]:
        """Return one hash per full block of the prompt."""
        num_full = request.num_tokens // self._block_size
        ids = request.ids
        if ids is None:  # negative ids, unique to this request
            first = -(request.number + 1) << 16
            ids = tuple(range(first, first + request.num_tokens // self._tokens_per_id + 1))
        hashes: list[bytes] = []
        for id in ids:
            hashes += self._of_id.get(id) or self._expand(id)
        return hashes[:num_full]

    def _expand(self, id: int) -> list[bytes]:
        first = id * self._blocks_per_id + 1
        hashes = [
            (number * _MIX % (1 << 8 * HASH_BYTES)).to_bytes(HASH_BYTES, "big")
            for number in range(first, first + self._blocks_per_id)
        ]
        if id >= 0:
            self._of_id[id] = hashes
        return hashes
