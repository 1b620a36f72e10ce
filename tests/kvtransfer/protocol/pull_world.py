"""Prefix fetches of protocol_world's decode replica from its prefill replicas, with the real state machines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from core.types.errors import TransferError
from core.types.handoff import PrefixSource
from kvtransfer.protocol.fetches import Fetch, PrefixFetches
from kvtransfer.protocol.frames import Opening
from kvtransfer.protocol.incoming_transfers import IncomingTransfer
from kvtransfer.protocol.rank_transfer import Shipment
from tests.kvtransfer.protocol.pools import layout

if TYPE_CHECKING:
    from tests.kvtransfer.protocol.protocol_world import World
    from tests.kvtransfer.protocol.receiving_world import Decode
    from tests.kvtransfer.protocol.sending_world import Prefill

MAX_BLOCKS = 3


def hashes_of(prefix: int) -> list[bytes]:
    return [b"prefix %d block %2d" % (prefix, i) for i in range(MAX_BLOCKS)]


def content_of(prefix: int) -> str:
    return f"prefix {prefix}"


@dataclass(eq=False)
class Want:
    """Blocks on the decode replica whose content is fetched."""

    prefix: int
    blocks: list[int]
    fetch: Fetch[Want] | None = None
    num_tokens: int = 0  # received
    is_running: bool = False  # received completely; no more writes

    @property
    def incoming(self) -> IncomingTransfer[Fetch[Want]] | None:
        return self.fetch.incoming if self.fetch else None


class Call:
    """Call from the fetching replica to the source. Messages arrive late, or never if the other end is dead."""

    def __init__(self, puller: Puller, fetch: Fetch[Want], prefix_source: Prefill) -> None:
        self.puller, self.fetch, self.prefix_source = puller, fetch, prefix_source
        self._unopened = set(range(1, puller.replica.tp))

    def opened(self, rank: int) -> None:
        self._unopened.discard(rank)
        if not self._unopened:
            self.ask()

    def ask(self) -> None:
        if self.prefix_source not in self.puller.world.prefills:  # the source has died
            self.fail()
            return
        handoff = self.fetch.handoff
        self.puller.world.post(partial(self.prefix_source.served_fetch, handoff, self.fetch.owner.prefix, self))

    def cancel(self) -> None:
        self.puller.world.post(partial(self.prefix_source.ungrant, self))

    def granted(self, num_tokens: int) -> None:
        if num_tokens <= self.fetch.opening.first_token:
            self.fail()

    def ended(self, shipment: Shipment | None, error: TransferError | None) -> None:
        if error:
            self.fail()

    def fail(self) -> None:
        self.puller.world.post(partial(self.puller.missed, self.fetch))


class Puller:
    """Fetch handling of both workers, without the waiting prompts."""

    def __init__(self, world: World, replica: Decode) -> None:
        self.world, self.replica = world, replica
        self.wants: list[Want] = []
        self.calls: list[Call] = []
        self.prefix_fetches: PrefixFetches[Want] = PrefixFetches(
            replica.ranks[0],
            replica.blocks,
            replica="d",
            addresses=[str(rank) for rank in range(replica.tp)],
            layout=layout(replica.tp),
            timeout_s=1.0,
            close_elsewhere=replica.close_elsewhere,
            call=self._call,
        )
        self._prefix_source: Prefill | None = None

    def want(self, prefix: int, num_blocks: int, prefix_source: Prefill) -> None:
        taken = self.replica.blocks.allocate([], num_blocks)
        if taken is None:
            return
        want = Want(prefix, taken[0])
        self.wants.append(want)
        self._prefix_source = prefix_source
        reported = PrefixSource(replica=prefix_source.name, address="p", num_tokens=num_blocks * 2)
        hashes = hashes_of(prefix)[:num_blocks]
        self.prefix_fetches.begin(
            want, reported, id=f"r{next(self.world.ids)}", hashes=hashes, blocks=want.blocks, first_block=0, now=0.0
        )

    def landed(self, fetch: Fetch[Want]) -> None:
        want = fetch.owner
        want.num_tokens, want.is_running = fetch.num_tokens, True
        self.replica.check_whole(want, fetch.id)

    def missed(self, fetch: Fetch[Want]) -> None:
        if self.prefix_fetches.missed(fetch):
            self._free(fetch.owner)

    def expire(self) -> None:
        for fetch in self.prefix_fetches.expired(math.inf):
            self._free(fetch.owner)

    def end(self, want: Want) -> None:
        """Cancel a fetch."""
        self.prefix_fetches.cancel(want)
        self._free(want)

    def _free(self, want: Want) -> None:
        """Free the blocks of a landed fetch. Otherwise the cancelled transfer has taken them over."""
        self.wants.remove(want)
        if want.is_running:
            self.replica.blocks.free(want.blocks)

    def _call(self, fetch: Fetch[Want]) -> Call:
        assert self._prefix_source and fetch.incoming
        fetch.owner.fetch = fetch
        self.replica.opened(fetch.opening, fetch.owner)
        call = Call(self, fetch, self._prefix_source)
        self.calls.append(call)
        for rank in range(1, self.replica.tp):
            self.world.post(partial(self._open_on, rank, fetch.opening, call))
        if self.replica.tp == 1:
            call.ask()
        return call

    def _open_on(self, rank: int, opening: Opening, call: Call) -> None:
        self.replica.ranks[rank].open(opening)
        call.opened(rank)
