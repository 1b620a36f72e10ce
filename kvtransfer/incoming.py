"""One handoff as one receiving rank sees it: what may be written where, and what has arrived."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cluster.errors import ChecksumMismatch, HandoffExpired
from cluster.rpc import transfer_pb2 as pb
from engine.kv_pool import KVPool
from kvtransfer.codec import Codec, Segment, checksum, combine_checksums
from kvtransfer.plan import HeadCopy


@dataclass
class _Source:
    """What one sending rank has delivered under the current epoch."""

    checksums: list[int] = field(default_factory=list)
    num_token_layers: int = 0
    is_committed: bool = False


@dataclass(frozen=True)
class Landing:
    """A handoff's KV is whole on one rank. The first tokens, one per choice, come with the landing on rank 0."""

    handoff: str
    epoch: int
    first_tokens: tuple[int, ...] = ()


class Incoming:
    """The blocks that one handoff may fill on this rank.

    Written by link threads, closed by the replica's owner. The lock makes closing final: when `close` has returned,
    nothing of this handoff is written any more, so its blocks can be used for something else.
    """

    def __init__(self, request: pb.OpenRequest, *, pool: KVPool, codec: Codec) -> None:
        self.handoff = request.handoff
        self._first_token = request.first_token
        self._num_tokens = request.num_tokens
        self._pool = pool
        self._codec = codec
        self._slots_T = _slots(request, pool)
        self._lock = threading.Lock()
        self._is_open = True
        self._epoch = 0
        self._sources: dict[int, _Source] = {}
        self._first_tokens: tuple[int, ...] = ()

    def write(self, announced: pb.Segment, payload: Tensor, *, copy: HeadCopy) -> None:
        """Check the payload of one announced segment and put it into the pool.

        Raises HandoffExpired if the handoff is closed or fenced, ChecksumMismatch if the bytes are damaged or a segment
        is missing before this one.
        """
        found = checksum(payload)
        if found != announced.checksum:
            raise ChecksumMismatch(f"handoff {self.handoff} segment {announced.number}: bytes damaged on the way")
        segment = Segment(
            first_layer=announced.first_layer,
            num_layers=announced.num_layers,
            first_token=announced.first_token,
            num_tokens=announced.num_tokens,
            first_head=copy.receiver_head,
            num_heads=copy.num_heads,
        )
        with self._lock:
            source = self._source(announced.epoch, copy.sender)
            if announced.number != len(source.checksums):
                raise ChecksumMismatch(f"handoff {self.handoff}: segment {len(source.checksums)} is missing")
            start = announced.first_token - self._first_token
            self._codec.unpack(payload, self._pool, segment, self._slots_T[start : start + segment.num_tokens])
            source.checksums.append(found)
            source.num_token_layers += segment.num_tokens * segment.num_layers

    def commit(self, commit: pb.Commit, *, copy: HeadCopy, num_sources: int) -> Landing | None:
        """One sending rank is done. The Landing when all `num_sources` of this rank are. Raises as `write` does."""
        self._pool.synchronize()
        with self._lock:
            source = self._source(commit.epoch, copy.sender)
            expected = (self._num_tokens - self._first_token) * self._pool.layout.num_layers
            if (len(source.checksums), source.num_token_layers) != (commit.num_segments, expected):
                raise ChecksumMismatch(f"handoff {self.handoff}: commit before all of it arrived")
            if combine_checksums(source.checksums) != commit.checksum:
                raise ChecksumMismatch(f"handoff {self.handoff}: segments arrived in another order than sent")
            source.is_committed = True
            self._first_tokens = tuple(commit.first_tokens) or self._first_tokens
            if sum(s.is_committed for s in self._sources.values()) < num_sources:
                return None
            return Landing(self.handoff, commit.epoch, self._first_tokens)

    def close(self) -> None:
        """Refuse everything from now on; waits for a write under way."""
        with self._lock:
            self._is_open = False

    def _source(self, epoch: int, sender: int) -> _Source:
        """The books of one sending rank. A newer epoch fences the older ones and starts from nothing."""
        if not self._is_open:
            raise HandoffExpired(f"handoff {self.handoff} is closed")
        if epoch < self._epoch:
            raise HandoffExpired(f"handoff {self.handoff}: epoch {epoch} is fenced by epoch {self._epoch}")
        if epoch > self._epoch:
            self._epoch, self._sources, self._first_tokens = epoch, {}, ()
        return self._sources.setdefault(sender, _Source())


def _slots(request: pb.OpenRequest, pool: KVPool) -> Tensor:
    """The pool slot of every missing position, in order."""
    size = pool.layout.block_size
    assert request.first_token % size == 0, "a handoff begins at a block"
    positions_T = torch.arange(request.num_tokens - request.first_token)
    blocks_B = torch.tensor(list(request.block_ids), dtype=torch.int64)
    return (blocks_B[positions_T // size] * size + positions_T % size).to(pool.device)
