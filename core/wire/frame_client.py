"""Router side of a worker's token frames: one connection per worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from google.protobuf.message import DecodeError

from core.identity.credentials import Identity
from core.identity.process_name import ProcessName
from core.rpc import worker_pb2 as pb
from core.types.errors import ReplicaLost
from core.types.network import split_address
from core.wire.channel import MAX_MESSAGE_BYTES, PING_EVERY_S
from core.wire.message_stream import BadMessage, MessageStream, client_context

_CONNECT_S = 20.0  # TLS included


async def follow_frames(
    address: str,
    *,
    peer: ProcessName,
    identity: Identity,
    take: Callable[[pb.Frame], None],
    connect_s: float = _CONNECT_S,
) -> None:
    """Connect to `peer` at `address`, and pass each frame to `take` until the worker closes the stream.

    With TLS the connection is mutual, and the worker's certificate must name `peer`.
    Raises ReplicaLost if the worker is unreachable, rejects this router or breaks the protocol, and anything that
    `take` raises.
    """

    has_begun = False

    def read(message: bytes) -> None:
        nonlocal has_begun
        has_begun = True
        frame = pb.Frame.FromString(message)
        if frame.error:
            raise ReplicaLost(f"{peer.replica}: {frame.error}")
        take(frame)

    stream = MessageStream(read, max_message_bytes=MAX_MESSAGE_BYTES)
    try:
        await _connect(stream, address, peer, identity, connect_s)
        stream.send(pb.FramesRequest(router=identity.name.router).SerializeToString())
        while not stream.ended.done():
            await asyncio.wait({stream.ended}, timeout=PING_EVERY_S)
            stream.send(b"")
    finally:
        stream.abort()
    error = stream.ended.result()
    if isinstance(error, OSError | BadMessage | DecodeError):
        raise ReplicaLost(f"{peer.replica}: {error!r} on the token stream from {address}") from error
    if error:
        raise error
    if not has_begun:  # a TLS client that is rejected gets no other information
        raise ReplicaLost(f"{peer.replica}: {address} closed the token stream at once; see the worker's log")


async def _connect(
    stream: MessageStream, address: str, peer: ProcessName, identity: Identity, connect_s: float
) -> None:
    try:
        host, port = split_address(address)
        tls = client_context(identity.tls_credentials) if identity.tls_credentials else None
        async with asyncio.timeout(connect_s):
            await asyncio.get_running_loop().create_connection(
                lambda: stream,
                host,
                port,
                ssl=tls,
                server_hostname=peer.host if tls else None,
            )
    except (OSError, ValueError, OverflowError) as error:  # TLS errors are OSErrors; ValueError: malformed address
        raise ReplicaLost(f"{peer.replica}: no connection to {address}: {error!r}") from error
