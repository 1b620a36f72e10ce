"""Incoming transfers of a replica: the handoffs that it has opened, tracked on rank 0. Pure. States: docs/HANDOFF.md.

Once a transfer is given up, a peer may still be writing on some rank until that rank has closed it. So its blocks stay
in quarantine meanwhile.

A prefix fetch is a handoff, too: an incoming transfer of at least one block, with room for every block that the source
is reported to hold. The source's commit carries the actual number. Then the owner's blocks hold the prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from core.types.handoff import Handoff, PrefixSource
from engine.kv.block_manager import BlockManager
from engine.kv.layout import KVLayout
from kvtransfer.protocol.frames import Opening, operation_timeout
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
        """Landing on rank 0, which has the next tokens. Valid once every rank has landed."""
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


class Call(Protocol):
    """The gRPC call to the source replica. Ending it before the KV has landed aborts the transfer."""

    def cancel(self) -> object: ...


@dataclass(eq=False)
class Fetch(Generic[T]):
    """One prefix fetch in progress for `owner`."""

    owner: T
    prefix_source: PrefixSource
    handoff: Handoff
    hashes: tuple[bytes, ...]  # from the start of the prefix
    timeout_s: float
    begun_at: float
    incoming: IncomingTransfer[T]
    call: Call | None = None

    @property
    def num_tokens(self) -> int:
        """Number of positions received. Valid once the fetch has landed."""
        return self.incoming.landing.num_tokens - self.handoff.first_token


class PrefixFetches(Generic[T]):
    """Registry of prefix fetches. Owned by the step thread of rank 0.

    `call` opens the handoff on the other ranks and calls the source replica; on failure `missed` is called.
    """

    def __init__(
        self,
        receiver: ReceivingEnd,
        blocks: BlockManager,
        *,
        replica: str,
        addresses: Sequence[str],
        layout: KVLayout,
        timeout_s: float,
        close_elsewhere: Callable[[str, Callable[[], None]], None],
        call: Callable[[Fetch[T]], Call],
    ) -> None:
        """timeout_s: for the source to respond; the time to move the bytes is added."""
        self._incoming_transfers: IncomingTransfers[T] = IncomingTransfers(
            receiver, blocks, num_ranks=len(addresses), close_elsewhere=close_elsewhere
        )
        self._replica = replica
        self._addresses = tuple(addresses)
        self._layout = layout
        self._timeout_s = timeout_s
        self._call = call
        self._under_way: dict[T, Fetch[T]] = {}

    def begin(
        self,
        owner: T,
        prefix_source: PrefixSource,
        *,
        id: str,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        state_slots: Sequence[int] = (),
        first_block: int,
        now: float,
    ) -> None:
        """Fetch the blocks of `hashes` from `first_block` on into the same positions of `blocks`.

        id: unique, and hard to guess for other processes. state_slots: slot for the state after the blocks, if the
        model has recurrent layers. now: seconds on the caller's clock.
        """
        size = self._layout.block_size
        cache = self._layout.cache.of_ranks(self._layout.tensor_parallel)
        num_bytes = cache.shipped_bytes(len(hashes) * size, held=first_block * size)
        timeout_s = operation_timeout(self._timeout_s, num_bytes)
        handoff = Handoff(
            id=f"{self._replica}/{id}",
            epoch=1,
            replica=self._replica,
            ranks=self._addresses,
            layout=self._layout.fingerprint,
            first_token=first_block * size,
            # Layers with a window are shipped up to a known end only, so such a prefix comes whole or not at all.
            num_tokens=(len(hashes) if self._layout.windows else first_block + 1) * size,
            max_tokens=len(hashes) * size,
            ttl_s=timeout_s,
        )
        opening = Opening.of(
            handoff, blocks[first_block : len(hashes)], state_slots=state_slots, sender=prefix_source.replica
        )
        incoming = self._incoming_transfers.open(opening, owner=owner, expires_at=now + timeout_s)
        fetch = Fetch(owner, prefix_source, handoff, tuple(hashes), timeout_s, begun_at=now, incoming=incoming)
        self._under_way[owner] = fetch
        fetch.call = self._call(fetch)

    def landed(self, rank: int, landing: Landing) -> Fetch[T] | None:
        """Record that one rank has received the prefix. Returns the fetch once, when every rank has."""
        incoming = self._incoming_transfers.landed(rank, landing)
        return self._under_way.pop(incoming.owner) if incoming else None

    def missed(self, fetch: Fetch[T]) -> bool:
        """Cancel a fetch that the source cannot serve. Returns False if it is over already."""
        if self._under_way.get(fetch.owner) is not fetch:
            return False
        self.cancel(fetch.owner)
        return True

    def expired(self, now: float) -> list[Fetch[T]]:
        """Cancel the fetches past their deadline and return them."""
        expired = [self._under_way[incoming.owner] for incoming in self._incoming_transfers.expired(now)]
        for fetch in expired:
            self.cancel(fetch.owner)
        return expired

    def cancel(self, owner: T) -> Fetch[T] | None:
        """Cancel the owner's fetch, if any. The owner loses its reference to the opened blocks."""
        fetch = self._under_way.pop(owner, None)
        if fetch:
            assert fetch.call
            fetch.call.cancel()
            self._incoming_transfers.give_up(fetch.incoming)
        return fetch
