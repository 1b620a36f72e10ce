"""The sending end of a rank's links: ships KV layer by layer while the next layer computes."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster.words.errors import LinkClosed
from cluster.words.handoff import Handoff
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from kvtransfer.movers.codec import codec_for
from kvtransfer.movers.outgoing_link import OutgoingLink
from kvtransfer.protocol.passage import Key, Outlet, Passage, Shipment
from kvtransfer.protocol.plan import plan_heads
from kvtransfer.protocol.segment import Segment

logger = logging.getLogger(__name__)

# Layers are sent together until a message has this size: docs/benchmarks/kv_path.md says why this one.
GROUP_BYTES = 1 << 20
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 1.0


class Sender:
    """One rank's outgoing links, one per receiving rank, made on first use and shared by all handoffs to it.

    `begin` and the passages belong to the step thread. Each link packs and sends on a thread of its own; its gRPC
    stream lives on `loop`. `on_shipped` is called from any of these, once per passage.
    """

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        pool: KVPool,
        wire_dtype: str,
        backend: str,
        host: str,
        timeout_s: float,
        loop: asyncio.AbstractEventLoop,
        on_shipped: Callable[[Shipment], None],
        group_bytes: int = GROUP_BYTES,
    ) -> None:
        self.name = name
        self.rank = rank
        self.pool = pool
        self.wire_dtype = wire_dtype
        self.backend = backend
        self.codec = codec_for(pool.layout, wire_dtype)
        self.host = host
        self.timeout_s = timeout_s
        self.loop = loop
        self._on_shipped = on_shipped
        self._group_rows = max(1, group_bytes // self.codec.num_bytes(_one_row(pool.layout)))
        self._passages: dict[Key, Passage] = {}
        self._links: dict[str, OutgoingLink] = {}
        self._failures: dict[str, int] = {}  # of links to an address, since one was welcome there
        self._epochs = itertools.count(1)

    def begin(self, handoff: Handoff, blocks: Sequence[int]) -> Passage | None:
        """Start to ship a sequence whose block table is `blocks`. None if this rank has no head to send there."""
        layout = self.pool.layout
        copies = plan_heads(sender=layout, receiver=replace(layout, tensor_parallel=len(handoff.ranks)))
        mine = [copy for copy in copies if copy.sender == self.rank]
        if not mine:
            return None
        passage = Passage(handoff, blocks, layout=layout, on_shipped=self._shipped, group_rows=self._group_rows)
        self._passages[passage.key] = passage
        links = [self._link_to(handoff.ranks[copy.receiver]) for copy in mine]
        passage.outlets = [Outlet(passage, copy, link) for copy, link in zip(mine, links, strict=True)]
        for outlet, link in zip(passage.outlets, links, strict=True):
            link.add(outlet)
        return passage

    def find(self, key: Key) -> Passage | None:
        """A passage that is not over."""
        return self._passages.get(key)

    async def close(self) -> None:
        """Close every link; what is under way fails."""
        for link in list(self._links.values()):
            link.fail(LinkClosed(f"{self.name} is stopping"))
            await link.disconnected()

    def link_welcome(self, address: str) -> None:
        self._failures.pop(address, None)

    def link_failed(self, address: str) -> None:
        self._failures[address] = self._failures.get(address, 0) + 1

    def _link_to(self, address: str) -> OutgoingLink:
        """The link to a rank. A failed one is replaced by a new one, of a new epoch, which waits a little longer
        before it connects each time that nobody is found."""
        link = self._links.get(address)
        if link is None or link.is_closed:
            failures = self._failures.get(address, 0)
            delay_s = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (failures - 1)) if failures else 0.0
            self._links = {a: link for a, link in self._links.items() if not link.is_closed}
            link = self._links[address] = OutgoingLink(self, address, epoch=next(self._epochs), delay_s=delay_s)
        return link

    def _shipped(self, shipment: Shipment) -> None:
        self._passages.pop((shipment.handoff, shipment.epoch), None)
        self._on_shipped(shipment)


def _one_row(layout: KVLayout) -> Segment:
    """One position of one layer, all heads of a rank."""
    return Segment(
        first_layer=0, num_layers=1, first_token=0, num_tokens=1, first_head=0, num_heads=layout.heads_per_rank
    )
