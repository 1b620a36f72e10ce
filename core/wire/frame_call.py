"""A router's stream of token frames from one worker, by fewer hands than gRPC's client has.

That hands a message from thread to thread before the event loop hears of it, four of them, each asleep until the one
before wakes it; and so at each step of each replica. Here the loop reads itself (docs/benchmarks/router.md). To the
worker it is a call like any other: its server is gRPC's, which asks for papers and allows the call as ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from core.identity.credentials import Identity
from core.identity.process_name import ProcessName
from core.rpc import worker_pb2 as pb
from core.types.errors import ClusterError
from core.wire.call_errors import error_of
from core.wire.channel import MAX_MESSAGE_BYTES, PING_EVERY_S
from core.wire.client_tls import client_context
from core.wire.frame_connection import FrameConnection

_SERVICE = pb.DESCRIPTOR.services_by_name["Worker"].full_name
_METHOD = f"/{_SERVICE}/Frames"
_CODES = {str(code.value[0]): code for code in grpc.StatusCode}
_CONNECTS_WITHIN_S = 20.0  # TLS and all, as gRPC's own


class FrameCall:
    """Implements router.serving.worker.WorkerCall. Connects at once, to `peer` and to nobody else who may be at
    `address`: by mutual TLS where `identity` has papers, with those of now."""

    def __init__(
        self,
        address: str,
        *,
        peer: ProcessName,
        identity: Identity,
        taker: Callable[[pb.Frame], None] | None = None,
        connects_within_s: float = _CONNECTS_WITHIN_S,
    ) -> None:
        """taker: has a frame at once that comes while whoever iterates waits for it. What it raises ends the call, and
        is raised to him."""
        self._taker = taker
        self._untaken: list[Exception] = []  # one at most, until it is raised: it knows by then who took
        self._replica = peer.replica
        self._connects_within_s = connects_within_s
        self._connection = FrameConnection(
            _METHOD,
            pb.FramesRequest(router=identity.name.router, takes_plain=True).SerializeToString(),
            scheme="https" if identity.tls_credentials else "http",
            authority=peer.host if identity.tls_credentials else address,
            max_message_bytes=MAX_MESSAGE_BYTES,
            quiet_s=PING_EVERY_S,
            straight=self._hand_over if taker else None,
        )
        self._connecting = asyncio.ensure_future(self._connect(address, peer, identity))

    def __aiter__(self) -> FrameCall:
        return self

    async def __anext__(self) -> pb.Frame:
        if (message := await self._connection.message()) is not None:
            return self._frame_of(message)
        if self._untaken:
            raise self._untaken.pop()
        if (error := self._error()) is None:
            raise StopAsyncIteration
        raise error

    def _hand_over(self, message: bytes) -> None:
        assert self._taker
        try:
            self._taker(self._frame_of(message))
        except Exception as error:  # the edge: the transport that brings it has no part in this
            self._untaken.append(error)
            self._connection.end("what it sent could not be taken")

    def _frame_of(self, message: bytes) -> pb.Frame:
        try:
            return pb.Frame.FromString(message)
        except DecodeError as unread:
            self._connection.end(f"it sent what is no frame: {unread}")
            raise self._made(grpc.StatusCode.UNAVAILABLE, self._connection.lost, ()) from unread

    def cancel(self) -> None:
        self._connecting.cancel()
        self._connection.end("it was cancelled")

    async def _connect(self, address: str, peer: ProcessName, identity: Identity) -> None:
        host, _, port = address.rpartition(":")
        try:
            tls = client_context(identity.tls_credentials) if identity.tls_credentials else None
            async with asyncio.timeout(self._connects_within_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: self._connection,
                    host.strip("[]"),
                    int(port),
                    ssl=tls,
                    server_hostname=peer.host if tls else None,
                )
        # Of TLS and of papers, too; or what a replica says of where it is makes no sense.
        except (OSError, ValueError, OverflowError) as error:
            self._connection.end(f"no connection to {address}: {error!r}")

    def _error(self) -> ClusterError | None:
        if self._connection.lost:
            return self._made(grpc.StatusCode.UNAVAILABLE, self._connection.lost, ())
        said = dict(self._connection.trailers)
        code = _CODES.get(said.get("grpc-status", ""), grpc.StatusCode.UNKNOWN)
        if code is grpc.StatusCode.OK:
            return None
        return self._made(code, unquote(said.get("grpc-message", "")), tuple(said.items()))

    def _made(self, code: grpc.StatusCode, details: str, trailers: tuple[tuple[str, str], ...]) -> ClusterError:
        """As if gRPC's own client had told it."""
        error = aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*trailers), details=details)
        return error_of(error, peer=self._replica)
