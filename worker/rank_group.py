"""Communication among the ranks of one replica."""

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
from core.identity.rules import GANG
from core.rpc import transfer_pb2 as pb
from core.rpc import transfer_pb2_grpc as rpc
from core.types.errors import ReplicaLost
from core.wire.call_errors import error_of
from core.wire.channel import open_lasting_channel
from core.wire.messages import to_message
from core.wire.rank_server import RankHost
from engine.runner.parallel import TensorParallel
from kvtransfer.protocol.frames import Opening
from kvtransfer.transfer.rank_servicer import RankServicer, StepCount
from kvtransfer.transfer.rendezvous import local_store, remote_store

_CALL_S = 3.0  # calls between ranks take milliseconds
_RETRY_S = 0.1
_LOOPBACK = "127.0.0.1"

_Method = Callable[..., Awaitable[Any]]  # stub method, untyped in grpc


class OtherRanks:
    """Clients of the other ranks of this replica. Used on the event loop only."""

    def __init__(self, addresses: list[str], *, identity: Identity, steps: StepCount, timeout_s: float) -> None:
        """addresses: all ranks, in rank order. identity: this rank's. steps: on rank 0, counts the broadcast steps."""
        self._timeout_s = timeout_s
        self._steps = steps
        replica, own = identity.name.replica, identity.name.rank
        self._channels = {
            rank: open_lasting_channel(address, peer=identity.rank(replica, rank), identity=identity)
            for rank, address in enumerate(addresses)
            if rank != own
        }
        self._stubs = {r: rpc.RankStub(channel) for r, channel in self._channels.items()}

    async def open(self, opening: Opening) -> None:
        """Open a handoff on every other rank, after all steps broadcast so far, which may have freed its blocks.

        Raises ReplicaLost if a rank does not answer.
        """
        request = to_message(pb.OpenRequest, opening, after_steps=self._steps.number)
        await asyncio.gather(
            *(_call(stub.Open, request, rank=rank, timeout_s=self._timeout_s) for rank, stub in self._stubs.items())
        )

    async def close_handoff(self, handoff: str) -> None:
        """Close a handoff on every other rank. After return, none of them writes to its blocks.

        Retries. Raises ReplicaLost if a rank does not answer within the timeout; the gang is then broken.
        """
        request = pb.CloseRequest(handoff=handoff)
        await asyncio.gather(*(self._retry(stub.Close, request, rank=rank) for rank, stub in self._stubs.items()))

    async def report(self, request: pb.ReportRequest) -> None:
        """Report to rank 0, with retries. Raises ReplicaLost."""
        await self._retry(self._stubs[0].Report, request, rank=0)

    def store(self, loop: asyncio.AbstractEventLoop, *, timeout_s: float) -> Store:
        """Return rank 0's rendezvous as a store, for another rank."""
        return remote_store(self._stubs[0], loop, timeout_s=timeout_s)

    async def disconnect(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def _retry(self, method: _Method, request: Message, *, rank: int) -> None:
        """Call an idempotent method until it succeeds. Raises ReplicaLost after the timeout."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return await _call(method, request, rank=rank, timeout_s=min(_CALL_S, self._timeout_s))
            except ReplicaLost:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_RETRY_S)


async def _call(method: _Method, request: Message, *, rank: int, timeout_s: float) -> None:
    try:
        await method(request, timeout=timeout_s)
    except aio.AioRpcError as error:
        raise error_of(error, peer=f"rank {rank}") from error


def connect(host: RankHost, addresses: list[str], *, steps: StepCount, start_s: float, ask_s: float) -> OtherRanks:
    """Connect to the other ranks of this replica, on the event loop that will use the channels."""

    async def connected() -> OtherRanks:
        return OtherRanks(addresses, identity=host.identity, steps=steps, timeout_s=ask_s)

    return host.call(connected(), timeout_s=start_s)


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
    """Connect to the other ranks of this replica and form the process group.

    addresses: the ranks' gRPC servers. Blocks until all ranks have joined; raises ReplicaLost after `start_s`.
    `ask_s` bounds each later call between ranks. A gang runs on one node and uses loopback, because Gloo does not
    authenticate its peers.
    """
    others = connect(host, addresses, steps=steps, start_s=start_s, ask_s=ask_s)
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
    """Return the host that the ranks of a replica connect through."""
    hosts = {address.rpartition(":")[0] for address in addresses}
    assert len(hosts) == 1, f"replica spans several nodes: {addresses}"
    return _LOOPBACK
