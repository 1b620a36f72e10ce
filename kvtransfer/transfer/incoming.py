"""One handoff on one receiving rank: its ledger and the blocks that it writes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from core.types.errors import ChecksumMismatch
from engine.kv.checksum import checksum
from engine.kv.pool import KVPool
from engine.runner.streams import Event
from kvtransfer.links.link import stream_event
from kvtransfer.protocol.frames import CommitFrame, Opening, Segment, SegmentFrame
from kvtransfer.protocol.ledger import Landing, Ledger
from kvtransfer.protocol.plan import HeadCopy
from kvtransfer.transfer.codec import Codec, slots_of, window_slots_of


class Incoming:
    """Blocks that one handoff may fill on this rank.

    Link threads write, the replica's owner closes. Closing is final: after `close` returns, nothing of this handoff is
    written and its blocks can be reused. The constructor checks the bounds of all slots; it raises TransferError for
    blocks outside the pool.
    """

    def __init__(self, opened: Opening, *, pool: KVPool, codec: Codec) -> None:
        self.handoff = opened.handoff
        self.end_token = opened.max_tokens
        self._first_token = opened.first_token
        layout = pool.layout
        self._window_start = layout.cache.window_start(opened.num_tokens, held=opened.first_token)
        windowed = frozenset(layer for layer in range(layout.num_layers) if layout.is_windowed(layer))
        self._ledger = Ledger(opened, windowed=windowed, window_start=self._window_start)
        self._pool = pool
        self._codec = codec
        assert opened.first_token % pool.layout.block_size == 0, "a handoff begins at a block"
        self._slots_T = slots_of(pool, opened.block_ids, 0, opened.max_tokens - opened.first_token)
        self._window_slots_T = None
        if windowed and opened.max_tokens > self._window_start:
            first_block = (self._window_start - opened.first_token) // layout.block_size
            pool.check_parts(opened.block_ids[first_block:])
            window_span = self._window_start - opened.first_token, opened.max_tokens - self._window_start
            self._window_slots_T = window_slots_of(pool, opened.block_ids, *window_span)
        self._state_index = pool.state_index(opened.state_slots[0]) if opened.state_slots else None
        self._opened = stream_event(pool.device)  # earlier uses of the blocks
        self._written: dict[int, Event] = {}  # last write per sending rank; each link has its own stream
        self._lock = threading.Lock()

    def write(self, frame: SegmentFrame, payload: Tensor, *, sender: str, copy: HeadCopy) -> None:
        """Check the payload that a rank of replica `sender` has announced, and write its heads, `copy`, to the pool.

        Raises TransferError if another replica fills this handoff, HandoffExpired if it is closed or fenced,
        ChecksumMismatch if the payload is corrupt or an earlier segment is missing.
        """
        if checksum(payload) != frame.checksum:
            raise ChecksumMismatch(f"handoff {self.handoff} segment {frame.number}: payload corrupted in transit")
        with self._lock:
            self._ledger.admit(frame.epoch, sender=sender)
            if self._ledger.accept(frame, copy=copy):
                self._opened.hold_up()
                self._unpack(payload, frame.segment, copy.receiver_heads)
                self._written[copy.sender] = stream_event(self._pool.device)

    def _unpack(self, payload: Tensor, segment: Segment, heads: Sequence[range]) -> None:
        if self._codec.is_of_states(segment):
            assert self._state_index is not None, "the opening has no state slot"
            self._codec.unpack_states(payload, self._pool, segment, heads, self._state_index)
            return
        start = segment.first_token - self._first_token
        slots_T, window_slots_T = self._slots_T[start : start + segment.num_tokens], self._window_slots_T
        if window_slots_T is not None:
            start = segment.first_window_token - self._window_start
            window_slots_T = window_slots_T[start : start + segment.num_window_tokens]
        self._codec.unpack(payload, self._pool, segment, heads, slots_T, window_slots_T=window_slots_T)

    def commit(self, frame: CommitFrame, *, sender: str, copy: HeadCopy, num_sources: int) -> Landing | None:
        """Mark one sending rank as complete.

        Returns the Landing when all `num_sources` senders of this rank are complete. Raises as `write` does.
        """
        self._pool.synchronize()
        with self._lock:
            self._ledger.admit(frame.epoch, sender=sender)
            return self._ledger.commit(frame, copy=copy, num_sources=num_sources)

    def close(self) -> None:
        """Reject every later frame. Waits for writes in progress."""
        with self._lock:
            self._ledger.close()
            for event in self._written.values():
                event.wait()
