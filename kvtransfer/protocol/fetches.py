"""Prefixes that a replica fetches from others that hold them, as its rank 0 sees them. Pure.

    begin ──> OPEN ──landed──────────────────────────────> the blocks are the owner's, and hold what was pulled
               └──missed, expired, cancelled──> given up   the blocks that were opened come back by themselves

A pull is a handoff like any other: an arrival of at least one block, with room for as many as the holder is said to
have. How many come, the holder's commit says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from core.types.handoff import Handoff, PrefixSource
from engine.kv.block_manager import BlockManager
from engine.kv.layout import KVLayout
from kvtransfer.protocol.frames import Opening
from kvtransfer.protocol.incoming_transfers import IncomingTransfer, IncomingTransfers, ReceivingEnd
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.segment import operation_timeout

T = TypeVar("T")


class Call(Protocol):
    """The call to the holder. Its end, while nothing has landed, ends the passage."""

    def cancel(self) -> object: ...


@dataclass(eq=False)
class Fetch(Generic[T]):
    """One prefix on its way here, for `owner`."""

    owner: T
    prefix_source: PrefixSource
    handoff: Handoff
    hashes: tuple[bytes, ...]  # from the beginning of the prefix
    timeout_s: float
    begun_at: float
    incoming: IncomingTransfer[Fetch[T]] | None = None
    call: Call | None = None

    @property
    def id(self) -> str:
        return self.handoff.id

    @property
    def opening(self) -> Opening:
        assert self.incoming
        return self.incoming.opening

    @property
    def num_tokens(self) -> int:
        """Positions that have come."""
        assert self.incoming
        return self.incoming.num_tokens - self.opening.first_token

    @property
    def features(self) -> bytes:
        """Of the last of these."""
        assert self.incoming
        return self.incoming.features

    @property
    def problem(self) -> str:
        """Of what has come; empty: none is known."""
        assert self.incoming
        return self.incoming.problem

    @property
    def exposed(self) -> set[int]:
        """The blocks that were opened for it."""
        return set(self.opening.block_ids)


class PrefixFetches(Generic[T]):
    """Owned by the step thread of rank 0, as the arrivals are.

    `call` opens the handoff on the other ranks, asks the holder, and leaves word by `missed` if nothing comes of it.
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
        """timeout_s: for the holder to answer, beyond what the bytes need."""
        self._incoming_transfers: IncomingTransfers[Fetch[T]] = IncomingTransfers(
            receiver, blocks, num_ranks=len(addresses), close_elsewhere=close_elsewhere
        )
        self._replica = replica
        self._addresses = tuple(addresses)
        self._layout = layout
        self._timeout_s = timeout_s
        self._call = call
        self._under_way: dict[T, Fetch[T]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(
        self,
        owner: T,
        prefix_source: PrefixSource,
        *,
        id: str,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        first_block: int,
        now: float,
    ) -> None:
        """Ask `prefix_source` for the blocks of `hashes` from `first_block` on, which go to the same places of
        `blocks`.

        `id` may come again, but not at the same time `now`, in seconds on the caller's clock. Who does not hear of the
        handoff must not be able to guess it.
        """
        size = self._layout.block_size
        num_bytes = (len(hashes) - first_block) * size * self._layout.bytes_per_token() * self._layout.tensor_parallel
        timeout_s = operation_timeout(self._timeout_s, num_bytes)
        handoff = Handoff(
            id=f"{self._replica}/{id}/pull/{int(now * 1e9):x}",
            epoch=1,
            replica=self._replica,
            ranks=self._addresses,
            layout=self._layout.fingerprint,
            first_token=first_block * size,
            num_tokens=(first_block + 1) * size,
            max_tokens=len(hashes) * size,
            ttl_s=timeout_s,
        )
        opening = Opening.of(handoff, blocks[first_block : len(hashes)], sender=prefix_source.replica)
        fetch = self._under_way[owner] = Fetch(owner, prefix_source, handoff, tuple(hashes), timeout_s, begun_at=now)
        fetch.incoming = self._incoming_transfers.open(opening, owner=fetch, expires_at=now + timeout_s)
        fetch.call = self._call(fetch)

    def landed(self, rank: int, landing: Landing) -> Fetch[T] | None:
        """One rank has what the holder sent. The pull, once, when every rank has."""
        incoming = self._incoming_transfers.landed(rank, landing)
        return self._under_way.pop(incoming.owner.owner) if incoming else None

    def missed(self, fetch: Fetch[T]) -> bool:
        """Nothing comes of it: it is given up. False if it is over already."""
        if self._under_way.get(fetch.owner) is not fetch:
            return False
        self.cancel(fetch.owner)
        return True

    def expired(self, now: float) -> list[Fetch[T]]:
        """Those that have waited long enough: they are given up."""
        expired = [incoming.owner for incoming in self._incoming_transfers.expired(now)]
        for fetch in expired:
            self.cancel(fetch.owner)
        return expired

    def cancel(self, owner: T) -> Fetch[T] | None:
        """The owner waits no more: if it did, the blocks that were opened are not its own any more."""
        fetch = self._under_way.pop(owner, None)
        if fetch:
            assert fetch.incoming and fetch.call
            fetch.call.cancel()
            self._incoming_transfers.give_up(fetch.incoming)
        return fetch
