"""The handoffs that a replica has opened, as its rank 0 sees them. Pure.

             every rank has landed
    OPEN ─────────────────────────────────────> WHOLE      the blocks are the owner's; nothing writes to them any more
     │
     │ given up: lease ended, or expired
     v
    CLOSING ──every rank says that it is closed──> CLOSED  the blocks are free

While CLOSING, a peer may still be writing on some rank: the blocks wait in quarantine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from engine.kv.block_manager import BlockManager
from kvtransfer.protocol.frames import Opening
from kvtransfer.protocol.ledger import Landing

T = TypeVar("T")


class ReceivingEnd(Protocol):
    """What writes into this rank's blocks: the Receiver."""

    def open(self, opening: Opening) -> None: ...

    def close(self, handoff: str) -> None:
        """When this returns, nothing of the handoff is written here any more."""
        ...


class IncomingTransferState(StrEnum):
    OPEN = "open"
    WHOLE = "whole"
    CLOSING = "closing"
    CLOSED = "closed"


@dataclass(eq=False)
class IncomingTransfer(Generic[T]):
    """One handoff that was opened here, for `owner`."""

    owner: T
    opening: Opening
    expires_at: float  # on the caller's clock
    state: IncomingTransferState = IncomingTransferState.OPEN
    problem: str = ""  # of what has landed; then nobody need wait any longer
    landed: dict[int, Landing] = field(default_factory=dict)  # the newest of each rank

    @property
    def id(self) -> str:
        return self.opening.handoff

    @property
    def num_tokens(self) -> int:
        """WHOLE: positions that are here."""
        return self.landed[0].num_tokens

    @property
    def next_tokens(self) -> tuple[int, ...]:
        return self.landed[0].next_tokens

    @property
    def features(self) -> bytes:
        """Of the last of these positions; empty: not known."""
        return self.landed[0].features

    @property
    def epoch(self) -> int:
        return self.landed[0].epoch


class IncomingTransfers(Generic[T]):
    """Owned by the step thread of rank 0. `close_elsewhere` closes a handoff on the other ranks, however long that may
    take, and then runs the command on this thread."""

    def __init__(
        self,
        receiver: ReceivingEnd,
        blocks: BlockManager,
        *,
        num_ranks: int,
        close_elsewhere: Callable[[str, Callable[[], None]], None],
    ) -> None:
        self._receiver = receiver
        self._blocks = blocks
        self._num_ranks = num_ranks
        self._close_elsewhere = close_elsewhere
        self._open: dict[str, IncomingTransfer[T]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, opening: Opening, *, owner: T, expires_at: float) -> IncomingTransfer[T]:
        """Open a handoff on this rank. The other ranks must have opened it too before anyone is told of it."""
        incoming = self._open[opening.handoff] = IncomingTransfer(owner, opening, expires_at)
        self._receiver.open(opening)
        return incoming

    def landed(self, rank: int, landing: Landing) -> IncomingTransfer[T] | None:
        """One rank has all of it. The arrival, once, when every rank has; if they do not have the same, it expires."""
        incoming = self._open.get(landing.handoff)
        if incoming is None or not 0 <= rank < self._num_ranks:
            return None
        known = incoming.landed.get(rank)
        if known is None or known.epoch < landing.epoch:
            incoming.landed[rank] = landing
        if len(incoming.landed) < self._num_ranks:
            return None
        counts = [incoming.landed[rank].num_tokens for rank in range(self._num_ranks)]
        if len({*counts}) > 1 or not incoming.opening.num_tokens <= counts[0] <= incoming.opening.max_tokens:
            incoming.problem, incoming.expires_at = f"its ranks have {counts} positions", -math.inf
            return None
        self._end(incoming, IncomingTransferState.WHOLE)
        self._close(incoming, lambda: None)  # they only forget it
        return incoming

    def give_up(self, incoming: IncomingTransfer[T]) -> None:
        """Nobody waits for it any more. Takes over the owner's reference to the blocks that were opened."""
        exposed = list(incoming.opening.block_ids)
        self._end(incoming, IncomingTransferState.CLOSING)
        self._blocks.quarantine(exposed)

        def closed() -> None:
            incoming.state = IncomingTransferState.CLOSED
            self._blocks.release(exposed)

        self._close(incoming, closed)

    def expired(self, now: float) -> list[IncomingTransfer[T]]:
        """Those that have waited long enough, or in vain: give them up."""
        return [incoming for incoming in self._open.values() if incoming.expires_at < now]

    def _end(self, incoming: IncomingTransfer[T], state: IncomingTransferState) -> None:
        incoming.state = state
        del self._open[incoming.id]

    def _close(self, incoming: IncomingTransfer[T], then: Callable[[], None]) -> None:
        self._receiver.close(incoming.id)
        if self._num_ranks == 1:
            then()
        else:
            self._close_elsewhere(incoming.id, then)
