"""How rank 0 of a replica learns that another of its ranks has died, or stands still: by its own connection to it.

The step thread would learn it from its next collective, and then only by that one's long timeout.
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
    """Never return while every rank answers; raise ReplicaLost as soon as one does not. Without addresses, return.

    addresses: of the ranks from 1 on. identity: of rank 0, which watches.
    """
    if not addresses:
        return
    async with asyncio.TaskGroup() as group:
        for rank, address in enumerate(addresses, start=1):
            group.create_task(_watch(address, identity.rank(identity.name.replica, rank), identity))


async def _watch(address: str, peer: ProcessName, identity: Identity) -> None:
    """Keepalive finds a rank that stands still. A connection may break without that, but then another one is made, with
    the certificate of that time."""
    while True:
        tls_credentials = identity.tls_credentials
        async with open_channel(address, peer=peer, identity=identity) as channel:
            while identity.tls_credentials is tls_credentials:
                try:
                    async with asyncio.timeout(_RECONNECT_S):
                        await channel.channel_ready()
                except TimeoutError:
                    raise ReplicaLost(f"the rank at {address} does not answer") from None
                await _until_broken(channel)


async def _until_broken(channel: aio.Channel) -> None:
    state = grpc.ChannelConnectivity.READY
    while state is grpc.ChannelConnectivity.READY:
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)
