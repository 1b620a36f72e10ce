"""Sender of one rank: ships KV layer by layer while the next layer computes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from core.identity.process_name import ProcessName
from core.types.errors import LinkClosed
from core.types.failpoint import FailpointStage
from core.types.handoff import Handoff, HandoffKey
from kvtransfer.protocol.plan import plan_heads
from kvtransfer.protocol.rank_transfer import LinkTransfer, RankTransfer, Shipment
from kvtransfer.transfer.link_config import LinkConfig
from kvtransfer.transfer.outgoing_link import OutgoingLink, Reconnection

# Measured in docs/benchmarks/kv_path.md. On a GPU each message costs kernel launches and a wait for its checksum, about
# 0.2 ms of host time, so messages are larger.
_GROUP_BYTES = {"cpu": 1 << 20, "cuda": 16 << 20}


class Sender:
    """Outgoing links of one rank, one per receiving rank, created on first use and shared by all handoffs.

    `begin` and the rank transfers are used on the step thread. Each link packs and sends on its own thread; its gRPC
    stream runs on `loop`. `on_shipped` is called from any of these threads, once per rank transfer.
    """

    def __init__(
        self,
        config: LinkConfig,
        *,
        loop: asyncio.AbstractEventLoop,
        on_shipped: Callable[[Shipment], None],
        group_bytes: int | None = None,
    ) -> None:
        """group_bytes: size up to which layers are batched into a message; None: the default for the pool's device."""
        self.config = config
        self._loop = loop
        self._on_shipped = on_shipped
        group_bytes = group_bytes or _GROUP_BYTES[config.pool.device.type]
        self._group_rows = max(1, group_bytes // config.codec.max_row_bytes())
        layout = config.pool.layout
        most_bytes = max((layout.state_bytes_of(layer) for layer in range(len(layout.recurrent_layers))), default=1)
        self._group_states = max(1, group_bytes // most_bytes)
        self._transfers: dict[HandoffKey, RankTransfer] = {}
        self._links: dict[tuple[ProcessName, str], OutgoingLink] = {}  # by receiver and address
        self._reconnections: defaultdict[str, Reconnection] = defaultdict(Reconnection)  # by address
        self._epochs = itertools.count(1)

    def begin(self, handoff: Handoff, blocks: Sequence[int], state_slot: int | None = None) -> RankTransfer | None:
        """Start shipping a sequence with block table `blocks`. Returns None if this rank sends no heads.

        state_slot: the sequence's, if the model has recurrent layers.
        """
        layout = self.config.pool.layout
        copies = plan_heads(sender=layout, receiver=replace(layout, tensor_parallel=len(handoff.ranks)))
        mine = [copy for copy in copies if copy.sender == self.config.rank]
        if not mine:
            return None
        transfer = RankTransfer(
            handoff,
            blocks,
            layout=layout,
            state_slot=state_slot,
            begun_at=time.monotonic(),
            group_rows=self._group_rows,
            group_states=self._group_states,
        )
        self._transfers[transfer.key] = transfer
        links = [self._link_to(handoff, copy.receiver) for copy in mine]
        transfer.link_transfers = [LinkTransfer(transfer, copy, link) for copy, link in zip(mine, links, strict=True)]
        for link_transfer, link in zip(transfer.link_transfers, links, strict=True):
            link.add(link_transfer)
        return transfer

    def find(self, key: HandoffKey) -> RankTransfer | None:
        """Return an active rank transfer, or None."""
        return self._transfers.get(key)

    async def close(self) -> None:
        """Close every link. Active transfers fail."""
        for link in list(self._links.values()):
            link.fail(LinkClosed(f"{self.config.identity.name} is stopping"))
            await link.disconnected()

    def _link_to(self, handoff: Handoff, rank: int) -> OutgoingLink:
        """Return the link to a receiving rank. A failed link is replaced under a new epoch."""
        address, peer = handoff.ranks[rank], self.config.identity.rank(handoff.replica, rank)
        link = self._links.get((peer, address))
        if link is None or link.is_closed:
            self._links = {to: link for to, link in self._links.items() if not link.is_closed}
            link = self._links[peer, address] = OutgoingLink(
                self.config,
                address,
                peer=peer,
                epoch=next(self._epochs),
                loop=self._loop,
                reconnection=self._reconnections[address],
                on_over=self._check_over,
            )
        return link

    def _check_over(self, transfer: RankTransfer) -> None:
        """Report a rank transfer once all its link transfers are over. Called from any thread.

        The thread that removes it from the table reports it, so it is reported once.
        """
        if transfer.is_over and self._transfers.pop(transfer.key, None) is not None:
            shipment = transfer.shipment(time.monotonic())
            self.config.failpoint(FailpointStage.FAILED if shipment.error else FailpointStage.SHIPPED, shipment.handoff)
            self._on_shipped(shipment)
