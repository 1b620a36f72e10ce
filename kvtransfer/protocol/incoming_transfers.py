"""Incoming transfers of a replica: the handoffs that it has opened, tracked on rank 0. Pure. States: docs/HANDOFF.md.

Once a transfer is given up, a peer may still be writing on some rank until that rank has closed it. So its blocks stay
in quarantine meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from engine.kv.block_manager import BlockManager
from kvtransfer.protocol.frames import Opening
from kvtransfer.protocol.ledger import Landing

T = TypeVar("T")


class ReceivingEnd(Protocol):
    """Component that writes into this rank's blocks (the Receiver)."""

    def open(self, opening: Opening) -> None: ...

    def close(self, handoff: str) -> None:
        """Close a handoff. After return, no byte of it is written on this rank."""
        ...


@dataclass(eq=False)
class IncomingTransfer(Generic[T]):
    """One handoff opened on this replica for `owner`."""

    owner: T
    opening: Opening
    expires_at: float  # on the caller's clock
    # Error in the received data. If set, the transfer expires at once.
    problem: str = ""
    landings: dict[int, Landing] = field(default_factory=dict)  # newest per rank

    @property
    def id(self) -> str:
        return self.opening.handoff

    @property
    def landing(self) -> Landing:
        """Landing on rank 0, which has the next tokens. Valid once WHOLE."""
        return self.landings[0]


class IncomingTransfers(Generic[T]):
    """Registry of incoming transfers. Owned by the step thread of rank 0.

    `close_elsewhere` closes a handoff on the other ranks, which may take long, and then runs its callback on this
    thread.
    """

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

    def open(self, opening: Opening, *, owner: T, expires_at: float) -> IncomingTransfer[T]:
        """Open a handoff on this rank. The other ranks must open it too before the handoff is sent to a peer."""
        incoming = self._open[opening.handoff] = IncomingTransfer(owner, opening, expires_at)
        self._receiver.open(opening)
        return incoming

    def landed(self, rank: int, landing: Landing) -> IncomingTransfer[T] | None:
        """Record one rank's landing. Returns the transfer once, when every rank has landed.

        If the ranks disagree on the number of positions, the transfer expires.
        """
        incoming = self._open.get(landing.handoff)
        if incoming is None or not 0 <= rank < self._num_ranks:
            return None
        previous = incoming.landings.get(rank)
        if previous is None or previous.epoch < landing.epoch:
            incoming.landings[rank] = landing
        if len(incoming.landings) < self._num_ranks:
            return None
        counts = [incoming.landings[rank].num_tokens for rank in range(self._num_ranks)]
        if len({*counts}) > 1 or not incoming.opening.num_tokens <= counts[0] <= incoming.opening.max_tokens:
            incoming.problem, incoming.expires_at = f"ranks received {counts} positions", -math.inf
            return None
        self._close(incoming, lambda: None)
        return incoming

    def give_up(self, incoming: IncomingTransfer[T]) -> None:
        """Cancel a transfer. Takes over the owner's reference to the opened blocks."""
        exposed = list(incoming.opening.exposed)
        self._blocks.quarantine(exposed)
        self._close(incoming, lambda: self._blocks.release(exposed))

    def expired(self, now: float) -> list[IncomingTransfer[T]]:
        """Return the transfers that are past their deadline or have failed. The caller gives them up."""
        return [incoming for incoming in self._open.values() if incoming.expires_at < now]

    def _close(self, incoming: IncomingTransfer[T], then: Callable[[], None]) -> None:
        del self._open[incoming.id]
        self._receiver.close(incoming.id)
        if self._num_ranks == 1:
            then()
        else:
            self._close_elsewhere(incoming.id, then)
