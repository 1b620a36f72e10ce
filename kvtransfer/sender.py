"""The sending end of a rank's links: ships KV layer by layer while the next layer computes."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cluster.errors import LinkClosed, TransferError
from cluster.handoff import Handoff
from cluster.rpc import transfer_pb2 as pb
from engine.kv_pool import KVPool
from kvtransfer.codec import Segment, codec_for
from kvtransfer.outgoing_link import OutgoingLink, Outlet
from kvtransfer.plan import plan_heads

logger = logging.getLogger(__name__)

_GROUP_BYTES = 1 << 20  # layers are sent together until a message has this size; small messages waste the link


@dataclass(frozen=True, kw_only=True)
class Shipment:
    """What one rank's part of a handoff came to."""

    handoff: str
    epoch: int
    wire_bytes: int  # payloads and announcements
    seconds: float  # from the first layer handed over to the last acknowledgement
    error: TransferError | None = None  # None: it has landed

    def to_report(self, *, rank: int) -> pb.ReportRequest:
        """What another rank than 0 tells its rank 0."""
        return pb.ReportRequest(
            handoff=self.handoff,
            epoch=self.epoch,
            rank=rank,
            wire_bytes=self.wire_bytes,
            seconds=self.seconds,
            error=str(self.error) if self.error else "",
        )

    @classmethod
    def from_report(cls, report: pb.ReportRequest) -> Shipment:
        return cls(
            handoff=report.handoff,
            epoch=report.epoch,
            wire_bytes=report.wire_bytes,
            seconds=report.seconds,
            error=TransferError(report.error) if report.error else None,
        )


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
        host: str,
        timeout_s: float,
        loop: asyncio.AbstractEventLoop,
        on_shipped: Callable[[Shipment], None],
    ) -> None:
        self.name = name
        self.rank = rank
        self.pool = pool
        self.wire_dtype = wire_dtype
        self.codec = codec_for(pool.layout, wire_dtype)
        self.host = host
        self.timeout_s = timeout_s
        self.loop = loop
        self._on_shipped = on_shipped
        self._links: dict[str, OutgoingLink] = {}
        self._epochs: dict[str, int] = {}

    def begin(self, handoff: Handoff, blocks: Sequence[int]) -> Passage | None:
        """Start to ship a sequence whose block table is `blocks`. None if this rank has no head to send there."""
        layout = self.pool.layout
        copies = plan_heads(sender=layout, receiver=replace(layout, tensor_parallel=len(handoff.ranks)))
        mine = [copy for copy in copies if copy.sender == self.rank]
        if not mine:
            return None
        passage = Passage(handoff, self.pool, blocks, self._on_shipped)
        passage.outlets = [Outlet(self._link_to(handoff.ranks[c.receiver]), c, passage) for c in mine]
        for outlet in passage.outlets:
            outlet.link.add(outlet)
        return passage

    async def close(self) -> None:
        """Close every link; what is under way fails."""
        for link in list(self._links.values()):
            link.fail(LinkClosed(f"{self.name} is stopping"))
            await link.disconnected()

    def _link_to(self, address: str) -> OutgoingLink:
        link = self._links.get(address)
        if link is None or link.is_closed:
            self._epochs[address] = epoch = self._epochs.get(address, 0) + 1
            link = self._links[address] = OutgoingLink(self, address, epoch=epoch)
        return link


class Passage:
    """One handoff on its way out of this rank.

    The caller keeps the sequence's blocks until `on_shipped` has been called: until then they are still being read.
    """

    def __init__(
        self, handoff: Handoff, pool: KVPool, blocks: Sequence[int], on_shipped: Callable[[Shipment], None]
    ) -> None:
        self.handoff = handoff
        self.outlets: list[Outlet] = []
        self._layout = pool.layout
        self._slots_T = _slots(blocks, handoff, pool)
        self._on_shipped = on_shipped
        self._group: Segment | None = None  # layers handed over and not yet sent
        self._started_at: float | None = None
        self._lock = threading.Lock()  # outlets end on link threads and on the loop
        self._is_ended = False
        self.is_aborted = False

    def layer_ready(self, layer: int, first_token: int, end_token: int, *, num_layers: int = 1) -> None:
        """The KV of positions [first_token, end_token) is in the pool for layers [layer, layer + num_layers)."""
        self._started_at = self._started_at or time.monotonic()
        first_token = max(first_token, self.handoff.first_token)
        num_tokens = end_token - first_token
        if num_tokens <= 0:
            return
        group = self._group
        if group and (group.first_token, group.num_tokens, group.layers.stop) == (first_token, num_tokens, layer):
            group = replace(group, num_layers=group.num_layers + num_layers)
        else:
            self._flush()
            group = Segment(
                first_layer=layer,
                num_layers=num_layers,
                first_token=first_token,
                num_tokens=num_tokens,
                first_head=0,
                num_heads=self._layout.heads_per_rank,
            )
        self._group = group
        num_bytes = num_tokens * group.num_layers * self._layout.bytes_per_token() // self._layout.num_layers
        if num_bytes >= _GROUP_BYTES or group.layers.stop == self._layout.num_layers:
            self._flush()

    def commit(self, first_tokens: Sequence[int] = ()) -> None:
        """All of it has been handed over. Rank 0 adds the first tokens."""
        self._started_at = self._started_at or time.monotonic()
        self._flush()
        for outlet in self.outlets:
            outlet.commit(first_tokens if outlet.copy.receiver == 0 else ())

    def abort(self) -> None:
        """Stop as soon as no block is being read; `on_shipped` still comes, with an error."""
        self.is_aborted = True
        for outlet in self.outlets:
            outlet.abort()

    def slots(self, segment: Segment) -> Tensor:
        start = segment.first_token - self.handoff.first_token
        return self._slots_T[start : start + segment.num_tokens]

    def outlet_ended(self) -> None:
        """Called by an outlet that has landed or failed."""
        with self._lock:
            if self._is_ended or not all(outlet.is_ended for outlet in self.outlets):
                return
            self._is_ended = True
        self._on_shipped(
            Shipment(
                handoff=self.handoff.id,
                epoch=self.handoff.epoch,
                wire_bytes=sum(outlet.wire_bytes for outlet in self.outlets),
                seconds=time.monotonic() - (self._started_at or time.monotonic()),
                error=next((outlet.error for outlet in self.outlets if outlet.error), None),
            )
        )

    def _flush(self) -> None:
        group, self._group = self._group, None
        if group:
            for outlet in self.outlets:
                outlet.send(group)


def _slots(blocks: Sequence[int], handoff: Handoff, pool: KVPool) -> Tensor:
    """The pool slot of every position that travels."""
    size = pool.layout.block_size
    positions_T = torch.arange(handoff.first_token, handoff.num_tokens)
    return (torch.tensor(blocks, dtype=torch.int64)[positions_T // size] * size + positions_T % size).to(pool.device)
