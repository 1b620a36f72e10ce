"""One handoff on one receiving rank: its books, and the blocks that its bytes go to."""

from __future__ import annotations

import threading

from torch import Tensor

from core.types.errors import ChecksumMismatch
from engine.kv.checksum import checksum
from engine.kv.pool import KVPool
from kvtransfer.links.device_stream import StreamEvent
from kvtransfer.protocol.frames import CommitFrame, Opening, SegmentFrame
from kvtransfer.protocol.ledger import Landing, Ledger
from kvtransfer.transfer.codec import Codec, slots_of


class Incoming:
    """The blocks that one handoff may fill on this rank.

    Written by link threads, closed by the replica's owner. The lock makes closing final: when `close` has returned,
    nothing of this handoff is written any more, so its blocks can be used for something else. Its slots were bounded
    when it was opened, once for all that is written: raises TransferError for blocks that the pool does not have.
    """

    def __init__(self, opened: Opening, *, pool: KVPool, codec: Codec) -> None:
        self.handoff = opened.handoff
        self.end_token = opened.max_tokens
        self._first_token = opened.first_token
        self._ledger = Ledger(opened, num_layers=pool.layout.num_layers)
        self._pool = pool
        self._codec = codec
        assert opened.first_token % pool.layout.block_size == 0, "a handoff begins at a block"
        self._slots_T = slots_of(pool, opened.block_ids, 0, opened.max_tokens - opened.first_token)
        self._opened = StreamEvent(pool.device)  # what the blocks were used for before
        self._written: dict[
            int, StreamEvent
        ] = {}  # by sending rank, whose link has a lane of its own: what was started last
        self._lock = threading.Lock()

    def write(self, frame: SegmentFrame, payload: Tensor, *, sender: str, source: int) -> None:
        """Check the payload that rank `source` of the replica `sender` has announced, and put it into the pool.

        Raises TransferError for a replica that does not fill this handoff, HandoffExpired if it is closed or fenced,
        ChecksumMismatch if the bytes are damaged or a segment is missing before this one.
        """
        if checksum(payload) != frame.checksum:
            raise ChecksumMismatch(f"handoff {self.handoff} segment {frame.number}: bytes damaged on the way")
        with self._lock:
            self._ledger.admit(frame.epoch, sender=sender)
            if self._ledger.accept(frame, source=source):
                start = frame.segment.first_token - self._first_token
                slots_T = self._slots_T[start : start + frame.segment.num_tokens]
                self._opened.hold_up()
                self._codec.unpack(payload, self._pool, frame.segment, slots_T)
                self._written[source] = StreamEvent(self._pool.device)

    def commit(self, frame: CommitFrame, *, sender: str, source: int, num_sources: int) -> Landing | None:
        """One sending rank is done. The Landing when all `num_sources` of this rank are. Raises as `write` does."""
        self._pool.synchronize()
        with self._lock:
            self._ledger.admit(frame.epoch, sender=sender)
            return self._ledger.commit(frame, source=source, num_sources=num_sources)

    def close(self) -> None:
        """Refuse everything from now on; waits for a write under way."""
        with self._lock:
            self._ledger.close()
            for mark in self._written.values():
                mark.wait()
