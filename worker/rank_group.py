"""The ranks of one replica among themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from google.protobuf.message import Message
from grpc import aio
from torch.distributed.distributed_c10d import Store

from core.identity.credentials import Identity
from core.identity.rendezvous_key import GANG
from core.rpc import transfer_pb2 as pb
from core.rpc import transfer_pb2_grpc as rpc
from core.types.errors import ReplicaLost
from core.wire.call_errors import error_of
from core.wire.channel import open_lasting_channel
from core.wire.proto_fields import to_message
from core.wire.rank_server import RankHost
from engine.runner.parallel import TensorParallel
from kvtransfer.protocol.frames import Opening
from kvtransfer.transfer.rank_servicer import RankServicer
from kvtransfer.transfer.rendezvous import local_store, remote_store
from kvtransfer.transfer.step_count import StepCount

_ANSWER_S = 3.0  # an answer between ranks takes milliseconds
_ASK_AGAIN_S = 0.1
_LOOPBACK = "127.0.0.1"

_Method = Callable[..., Awaitable[Any]]  # of a stub, which grpc does not type


class OtherRanks:
    """The other ranks of this replica, as one rank sees them. Lives on the event loop."""

    def __init__(self, addresses: list[str], *, identity: Identity, steps: StepCount, timeout_s: float) -> None:
        """addresses: of all ranks, in rank order. identity: of this one. steps: that the others were told of, if this
        is rank 0."""
        self._timeout_s = timeout_s
        self._steps = steps
        replica, own = identity.name.replica, identity.name.rank
        self._channels = {
            rank: open_lasting_channel(address, peer=identity.rank(replica, rank), identity=identity)
            for rank, address in enumerate(addresses)
            if rank != own
        }
        self._stubs = {r: rpc.RankStub(channel) for r, channel in self._channels.items()}

    @classmethod
    async def connect(
        cls, addresses: list[str], *, identity: Identity, steps: StepCount, timeout_s: float
    ) -> OtherRanks:
        """Make the channels on the event loop that will use them."""
        return cls(addresses, identity=identity, steps=steps, timeout_s=timeout_s)

    async def open(self, opening: Opening) -> None:
        """Open a handoff on every other rank, behind every step that it was told of before: one of them may have freed
        these blocks. Raises ReplicaLost if one does not answer."""
        request = to_message(pb.OpenRequest, opening, after_steps=self._steps.number)
        await asyncio.gather(
            *(_call(stub.Open, request, rank=rank, timeout_s=self._timeout_s) for rank, stub in self._stubs.items())
        )

    async def close_handoff(self, handoff: str) -> None:
        """Close a handoff on every other rank; when this returns, none of them writes to its blocks any more.

        Asks again and again. Raises ReplicaLost when a rank does not answer for long: then the gang is broken.
        """
        request = pb.CloseRequest(handoff=handoff)
        await asyncio.gather(*(self._insist(stub.Close, request, rank=rank) for rank, stub in self._stubs.items()))

    async def report(self, request: pb.ReportRequest) -> None:
        """Tell rank 0 about this rank's part of a handoff, again and again until it has heard."""
        await self._insist(self._stubs[0].Report, request, rank=0)

    def store(self, loop: asyncio.AbstractEventLoop, *, timeout_s: float) -> Store:
        """The meeting at rank 0, as the other ranks see it."""
        return remote_store(self._stubs[0], loop, timeout_s=timeout_s)

    async def disconnect(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def _insist(self, method: _Method, request: Message, *, rank: int) -> None:
        """For what must not be lost, and does no harm twice."""
        give_up_at = time.monotonic() + self._timeout_s
        while True:
            try:
                return await _call(method, request, rank=rank, timeout_s=min(_ANSWER_S, self._timeout_s))
            except ReplicaLost:
                if time.monotonic() > give_up_at:
                    raise
                await asyncio.sleep(_ASK_AGAIN_S)


async def _call(method: _Method, request: Message, *, rank: int, timeout_s: float) -> None:
    try:
        await method(request, timeout=timeout_s)
    except aio.AioRpcError as error:
        raise error_of(error, peer=f"rank {rank}") from error


def open_gang(
    servicer: RankServicer,
    host: RankHost,
    addresses: list[str],
    *,
    rank: int,
    steps: StepCount,
    device: torch.device,
    start_s: float,
    ask_s: float,
) -> tuple[OtherRanks, TensorParallel]:
    """Meet the other ranks of this replica, whose gRPC servers are at `addresses`.

    Blocks until all are there; raises ReplicaLost after `start_s`. `ask_s` bounds each later call between ranks.
    A gang is on one node, and what it says to itself does not leave it: Gloo asks nobody who he is.
    """
    connecting = OtherRanks.connect(addresses, identity=host.identity, steps=steps, timeout_s=ask_s)
    others = host.call(connecting, timeout_s=start_s)
    size = len(addresses)
    if size == 1:
        return others, TensorParallel()
    if rank == 0:
        store = local_store(servicer.rendezvous, timeout_s=start_s)
    else:
        store = others.store(host.loop, timeout_s=start_s)
    parallel = TensorParallel.join(
        store, prefix=GANG, rank=rank, size=size, host=_own_host(addresses), device=device, meet_s=start_s
    )
    return others, parallel


def _own_host(addresses: list[str]) -> str:
    """Where the ranks of a replica find each other."""
    hosts = {address.rpartition(":")[0] for address in addresses}
    assert len(hosts) == 1, f"a replica on several nodes: {addresses}"
    return _LOOPBACK
