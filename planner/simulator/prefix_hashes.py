"""Prefix hashes of a trace's requests, made from the trace's block ids instead of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
        self._of_turn: dict[int, list[bytes]] = {}  # by number of the request, its answer included

    @classmethod
    def of_trace(cls, trace: Sequence[TraceRequest], block_size: int, *, has_states: bool) -> PrefixHashes:
        """Return the hashes of a trace.

        has_states: a prefix is reusable behind checkpoints only. Blocks of a prompt's last id, which may be partly
        filled, must then equal those of the next turn; see hashes_of.
        """
        hashes = cls(block_size, trace[0].tokens_per_id)
        if has_states:
            found = hashes_of(trace, block_size)
            hashes._of_turn = {request.number: own for request, own in zip(trace, found, strict=True)}
        return hashes

    def of(self, request: TraceRequest) -> list[bytes]:
        """Return one hash per full block of the prompt."""
        num_full = request.num_tokens // self._block_size
        if known := self._of_turn.get(request.number):
            return known[:num_full]
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


def hashes_of(trace: Sequence[TraceRequest], block_size: int) -> list[list[bytes]]:
    """Return the hashes of each request's blocks, those of its answer included.

    A prompt introduces its last full id if no earlier request has it. The first later request with this id continues
    the conversation if its prompt is long enough to hold the answer: its blocks then are also the answer's. Other
    answers are unique.
    """
    expand = PrefixHashes(block_size, trace[0].tokens_per_id)
    introduced: dict[int, int] = {}
    for request in trace:
        for id in request.ids or ():
            introduced.setdefault(id, request.number)
    found: dict[int, list[bytes]] = {}
    latest: dict[int, TraceRequest] = {}
    for request in reversed(trace):
        ids = (request.ids or ())[: request.num_tokens // request.tokens_per_id]
        num_blocks = (request.num_tokens + request.num_output) // block_size
        turn = latest.get(ids[-1]) if ids and introduced[ids[-1]] == request.number else None
        if turn and turn.num_tokens >= request.num_tokens + request.num_output:
            found[request.number] = found[turn.number][:num_blocks]
        else:
            answer = replace(request, number=len(trace) + request.number, num_tokens=num_blocks * block_size, ids=None)
            prompt = expand.of(request)
            found[request.number] = prompt + expand.of(answer)[len(prompt) :]
        latest.update(dict.fromkeys(request.ids or (), request))
    return [found[request.number] for request in trace]
