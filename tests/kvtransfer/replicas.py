"""Ranks that ship KV to each other over real gRPC and real links, in this process or in another one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from core.rpc import transfer_pb2_grpc as rpc
from core.types.failpoint import Failpoint, unobserved
from core.types.handoff import Handoff
from core.wire.channel import listen, make_server
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from kvtransfer.links.link import LinkGuard
from kvtransfer.protocol.frames import Opening
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.rank_transfer import Shipment
from kvtransfer.transfer.link_config import LinkConfig
from kvtransfer.transfer.rank_servicer import RankServicer
from kvtransfer.transfer.receiver import Receiver
from kvtransfer.transfer.sender import Sender
from tests.support.forks import forks
from tests.support.identities import in_clear
from tests.support.identities import rank as named

END_S = 60.0  # bound for events that must happen, on any machine


def link_config(
    layout: KVLayout,
    *,
    name: str = "prefill-0",
    rank: int = 0,
    num_blocks: int = 12,
    device: str = "cpu",
    wire: str = "raw",
    link: str = "tcp",
    is_encrypted: bool = False,
    timeout_s: float = END_S,
    failpoint: Failpoint = unobserved,
) -> LinkConfig:
    return LinkConfig(
        rank=rank,
        identity=in_clear(named(name, rank)),
        pool=KVPool(layout, num_blocks=num_blocks, device=torch.device(device)),
        wire_dtype=wire,
        backend=link,
        host="127.0.0.1",
        timeout_s=timeout_s,
        guard=LinkGuard(bytes(range(32)), is_encrypted),
        failpoint=failpoint,
    )


def handoff_to(
    ranks: Sequence[str], num_tokens: int, *, id: str = "h", epoch: int = 1, first_token: int = 0
) -> Handoff:
    """Return a ticket for positions [first_token, num_tokens) at these addresses."""
    return Handoff(
        id=id,
        epoch=epoch,
        replica="decode-0",
        ranks=tuple(ranks),
        layout="",
        num_tokens=num_tokens,
        max_tokens=num_tokens,
        first_token=first_token,
        ttl_s=END_S,
    )


@dataclass
class Replica:
    """Ranks of one replica in this process, and what they report."""

    landings: asyncio.Queue[Landing] = field(default_factory=asyncio.Queue)
    shipments: asyncio.Queue[Shipment] = field(default_factory=asyncio.Queue)
    senders: list[Sender] = field(default_factory=list)
    receivers: list[Receiver] = field(default_factory=list)
    servicers: list[RankServicer] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)

    @property
    def pools(self) -> list[KVPool]:
        return [sender.config.pool for sender in self.senders]

    def open(self, handoff: Handoff, blocks: Sequence[int]) -> None:
        """Open a handoff on every rank. blocks: of the sequence, from position 0 on."""
        for receiver in self.receivers:
            receiver.open(Opening.of(handoff, blocks[handoff.first_token // receiver.config.pool.layout.block_size :]))

    def ship(
        self, handoff: Handoff, blocks: Sequence[int], *, chunks: Sequence[int] = (), next_tokens: Sequence[int] = (1,)
    ) -> None:
        """Ship a prompt by chunk and layer, as the step loop does."""
        for sender in self.senders:
            if transfer := sender.begin(handoff, blocks):
                start = 0
                for end in chunks or [handoff.num_tokens]:
                    for layer in range(sender.config.pool.layout.num_layers):
                        transfer.layer_ready(layer, start, end)
                    start = end
                transfer.commit(handoff.num_tokens, next_tokens)

    async def landed(self) -> Landing:
        async with asyncio.timeout(END_S):
            return await self.landings.get()

    async def shipped(self) -> Shipment:
        async with asyncio.timeout(END_S):
            return await self.shipments.get()


@asynccontextmanager
async def replica(
    layout: KVLayout, num_ranks: int = 1, *, port: int = 0, group_bytes: int | None = None, **config: Any
) -> AsyncIterator[Replica]:
    """Serve the ranks of a replica. config: see link_config."""
    made, loop, servers = Replica(), asyncio.get_running_loop(), []
    for rank in range(num_ranks):
        of_rank = link_config(replace(layout, tensor_parallel=num_ranks), rank=rank, **config)
        servicer = RankServicer()
        servicer.receiver = Receiver(
            of_rank,
            rendezvous=servicer.rendezvous,
            on_landed=lambda landing: loop.call_soon_threadsafe(made.landings.put_nowait, landing),
        )
        sender = Sender(
            of_rank,
            loop=loop,
            on_shipped=lambda shipment: loop.call_soon_threadsafe(made.shipments.put_nowait, shipment),
            group_bytes=group_bytes,
        )
        server = make_server(of_rank.identity)
        rpc.add_RankServicer_to_server(servicer, server)
        made.addresses.append(f"127.0.0.1:{listen(server, f'127.0.0.1:{port}', of_rank.identity)}")
        made.receivers.append(servicer.receiver)
        made.servicers.append(servicer)
        made.senders.append(sender)
        await server.start()
        servers.append(server)
    try:
        yield made
    finally:
        for sender in made.senders:
            await sender.close()
        for server in servers:
            await server.stop(None)


@dataclass
class FarReplica:
    """Replica of one rank in another process."""

    address: str
    process: BaseProcess
    orders: Connection

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid
        os.kill(self.process.pid, number)

    def read(self) -> Any:
        """Return the bytes of the rank's pool: of its codes and scales, by layer."""
        self.orders.send("read")
        return self.orders.recv()


@contextmanager
def far_replica(layout: KVLayout, openings: Sequence[Opening], **config: Any) -> Iterator[FarReplica]:
    """Serve a replica with open handoffs. config: see replica."""
    ours, theirs = forks.Pipe()
    process = forks.Process(target=_serve, args=(theirs, layout, openings, config), daemon=True)
    process.start()
    try:
        assert ours.poll(END_S), "the other process did not start"
        yield FarReplica(ours.recv(), process, ours)
    finally:
        process.kill()
        process.join(10)


def _serve(orders: Connection, layout: KVLayout, openings: Sequence[Opening], config: dict[str, Any]) -> None:
    os.environ["NCCL_HOSTID"] = "the peer's"  # allows two NCCL ranks on one GPU
    asyncio.run(_serve_forever(orders, layout, openings, config))


async def _serve_forever(
    orders: Connection, layout: KVLayout, openings: Sequence[Opening], config: dict[str, Any]
) -> None:
    async with replica(layout, name="decode-0", **config) as made:
        for opening in openings:
            made.receivers[0].open(opening)
        orders.send(made.addresses[0])
        while await asyncio.to_thread(orders.recv) == "read":
            pool = made.pools[0]
            orders.send([part.view(torch.uint8).cpu().numpy() for part in [*pool.codes, *pool.scales]])
