"""Detection, on rank 0, of dead or frozen ranks by a gRPC connection to each.

The step thread would notice only in its next collective, after a long timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
from grpc import aio

from core.identity.credentials import Identity
from core.identity.process_name import ProcessName
from core.types.errors import ReplicaLost
from core.wire.channel import open_channel

_RECONNECT_S = 1.0


async def watch_ranks(addresses: Sequence[str], identity: Identity) -> None:
    """Watch until a rank is unreachable, then raise ReplicaLost. Returns at once if there are no addresses.

    addresses: ranks 1 and up. identity: rank 0's.
    """
    if not addresses:
        return
    async with asyncio.TaskGroup() as group:
        for rank, address in enumerate(addresses, start=1):
            group.create_task(_watch(address, identity.rank(identity.name.replica, rank), identity))


async def _watch(address: str, peer: ProcessName, identity: Identity) -> None:
    """Watch one rank. Keepalive detects a frozen rank; a broken connection is reopened with the current certificate."""
    while True:
        tls_credentials = identity.tls_credentials
        async with open_channel(address, peer=peer, identity=identity) as channel:
            while identity.tls_credentials is tls_credentials:
                try:
                    async with asyncio.timeout(_RECONNECT_S):
                        await channel.channel_ready()
                except TimeoutError:
                    raise ReplicaLost(f"rank at {address} does not answer") from None
                await _until_broken(channel)


async def _until_broken(channel: aio.Channel) -> None:
    state = grpc.ChannelConnectivity.READY
    while state is grpc.ChannelConnectivity.READY:
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)
