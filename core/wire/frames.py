"""Token frames: the output of a worker's step loop, bundled per router, on a port of their own; server and client.

A router connects, with mutual TLS if this worker has credentials, and names itself in a FramesRequest. Frames follow
until either end closes the connection. A rejection is one frame with `error`. As a sign of life the router sends an
empty message each second, and the worker a frame every HEARTBEAT_S.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from google.protobuf.message import DecodeError

from core.identity.credentials import Identity, TlsCredentials
from core.identity.process_name import ProcessName
from core.identity.rules import FRAMES_RULE
from core.rpc import worker_pb2 as pb
from core.types.errors import CapacityError, ClusterError, ReplicaLost, RequestError
from core.types.network import split_address
from core.types.request import SampledToken
from core.types.validation import check_name
from core.wire.channel import MAX_MESSAGE_BYTES, PING_EVERY_S
from core.wire.message_stream import BadMessage, MessageStream, client_context, server_context
from core.wire.messages import add_stream_token

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
# Maximum age of a replica's status at the routers while its set of requests is unchanged. Sending the status with each
# token would take 0.2 ms between two steps, and time on each router.
STATUS_S = 0.05
MAX_ROUTERS = 1024
_OPEN_S = 10.0  # for TLS and the request
_CONNECT_S = 20.0  # of a router, TLS included
_MAX_REQUEST_BYTES = 4096
MAX_UNNAMED = 128  # connections before their FramesRequest; beyond, the oldest is dropped
_DRAIN_S = 20.0  # a router that reads nothing for this long is dropped, so its next frame stays bounded
_CLOSE_S = 1.0
_LOOK_S, _MAX_QUIET_LOOKS = 0.5, 6  # checks without a byte from the router, which sends something each second
_ACCEPT_AGAIN_S = 0.5

StreamToken = tuple[int, SampledToken]  # (key of the stream, its next token)


class FrameHub:
    """Outgoing tokens per router, at most one frame per step, and the worker's status when it changes.

    Lives on the event loop. A slow router gets fewer and larger frames. Tokens are never dropped while a router's
    stream is open, and never stored without one.
    """

    def __init__(self) -> None:
        self._outboxes: dict[str, _Outbox] = {}
        self._status = pb.Status()
        self._is_closed = False

    def close(self) -> None:
        """End every router's stream, because this worker failed."""
        self._is_closed = True
        for outbox in self._outboxes.values():
            outbox.wake.set()

    def publish(self, tokens: Mapping[str, Iterable[StreamToken]], status: pb.Status | None = None) -> None:
        """Add tokens to each router's next frame; send a changed status to every router."""
        if status is not None and status != self._status:
            self._status = status
            for outbox in self._outboxes.values():
                outbox.frame.status.CopyFrom(status)
                outbox.wake.set()
        for router, streams in tokens.items():
            if router in self._outboxes:
                self._outboxes[router].add(streams)

    def num_frames(self, router: str) -> int:
        """Return how many frames carry everything published for this router so far; 0: no open stream."""
        outbox = self._outboxes.get(router)
        return outbox.number + 1 if outbox else 0

    async def frames(self, router: str) -> AsyncGenerator[pb.Frame, None]:
        """Yield this router's frames. A second stream of the same router replaces the first.

        Raises CapacityError if too many routers are connected.
        """
        if len(self._outboxes) >= MAX_ROUTERS and router not in self._outboxes:
            raise CapacityError(f"{MAX_ROUTERS} routers are connected, the maximum; try again later")
        outbox = self._outboxes[router] = _Outbox()
        outbox.frame.status.CopyFrom(self._status)
        outbox.wake.set()
        try:
            while self._outboxes.get(router) is outbox and not self._is_closed:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await outbox.wake.wait()
                except TimeoutError:
                    pass  # send an empty frame as a heartbeat
                outbox.wake.clear()
                yield outbox.next_frame()
        finally:
            if self._outboxes.get(router) is outbox:
                del self._outboxes[router]


class FrameServer:
    """Server of the frames of `hub`. Lives on one event loop."""

    def __init__(
        self,
        hub: FrameHub,
        identity: Identity,
        *,
        open_s: float = _OPEN_S,
        drain_s: float = _DRAIN_S,
        look_s: float = _LOOK_S,
    ) -> None:
        self._hub = hub
        self._identity = identity
        self._open_s = open_s
        self._drain_s = drain_s
        self._look_s = look_s
        self._tls_credentials: TlsCredentials | None = None  # credentials of `_tls`
        self._tls: ssl.SSLContext | None = None
        self._listening: socket.socket | None = None
        self._loops: list[asyncio.Task[None]] = []
        self._serving: set[asyncio.Task[None]] = set()
        self._unnamed: dict[asyncio.Task[None], None] = {}  # tasks without a request yet, oldest first
        self._streams: dict[MessageStream, str] = {}  # of named routers; the value is for logs

    def start(self, host: str) -> int:
        """Listen on a free port of `host` and return it. Raises OSError."""
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = self._listening = socket.create_server((host, 0), family=family)
        listening.setblocking(False)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
        self._loops = [asyncio.ensure_future(self._accept(listening)), asyncio.ensure_future(self._drop_silent())]
        return int(listening.getsockname()[1])

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        for tasks in (self._loops, [*self._serving]):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._listening:
            self._listening.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:  # out of file descriptors, for example
                logger.warning("cannot accept a router's connection: %s", error)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            task = loop.create_task(self._serve(connection))
            self._serving.add(task)
            self._unnamed[task] = None
            task.add_done_callback(self._forget)
            await asyncio.sleep(0)  # let the task take ownership of the connection, and others run in a burst
            if len(self._unnamed) > MAX_UNNAMED:
                oldest = next(iter(self._unnamed))
                del self._unnamed[oldest]
                oldest.cancel()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        self._unnamed.pop(task, None)

    async def _drop_silent(self) -> None:
        """Drop silent routers. Counts checks, not seconds: after a pause, bytes already received are read first."""
        while True:
            await asyncio.sleep(self._look_s)
            for stream, router in list(self._streams.items()):
                stream.num_quiet += 1
                if stream.num_quiet > _MAX_QUIET_LOOKS:
                    logger.warning(
                        "dropped connection router=%s: silent for %g s", router, stream.num_quiet * self._look_s
                    )
                    stream.abort()

    async def _serve(self, connection: socket.socket) -> None:
        request: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def take(message: bytes) -> None:
            if request.done():
                raise BadMessage("a router sends one request")
            request.set_result(message)

        stream = MessageStream(take, max_message_bytes=_MAX_REQUEST_BYTES)
        peer = _peer(connection)
        try:
            async with asyncio.timeout(self._open_s):
                caller = await self._connect(stream, connection)
                either: set[asyncio.Future[Any]] = {request, stream.ended}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if request.done():
                await self._answer(stream, request.result(), caller)
            elif error := stream.ended.result():
                raise error
        except ClusterError as error:
            logger.warning("refused frames peer=%s: %s", peer, error)
            await self._reject(stream, error)
        except (OSError, ValueError) as error:  # of TLS, too
            logger.info("dropped connection peer=%s: %r", peer, error)
        finally:
            stream.abort()

    async def _connect(self, stream: MessageStream, connection: socket.socket) -> ProcessName | None:
        """Return the name in the caller's certificate; None if it has none, or without TLS."""
        try:
            tls = self._context()
        except OSError as error:
            logger.warning("cannot use this worker's certificate: %s", error)
            connection.close()
            raise
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(lambda: stream, connection, ssl=tls)
        shown = transport.get_extra_info("peercert") or {}
        uris = [value for kind, value in shown.get("subjectAltName", ()) if kind == "URI"]
        return ProcessName.parse(uris[0]) if len(uris) == 1 else None

    async def _answer(self, stream: MessageStream, message: bytes, caller: ProcessName | None) -> None:
        """Send frames until the connection or the hub ends. Raises ClusterError for a rejection."""
        try:
            request = pb.FramesRequest.FromString(message)
        except DecodeError as error:
            raise RequestError(f"not a FramesRequest: {error}") from None
        check_name(request.router, "router")
        if self._identity.tls_credentials and (rejection := FRAMES_RULE.verdict(request, caller, self._identity.name)):
            raise RequestError(rejection)
        task = asyncio.current_task()
        assert task
        self._unnamed.pop(task, None)
        self._streams[stream] = request.router
        stream.ended.add_done_callback(lambda _: task.cancel())
        try:
            async with aclosing(self._hub.frames(request.router)) as frames:
                async for frame in frames:
                    if stream.ended.done():
                        return
                    stream.send(frame.SerializeToString())
                    await stream.drained(self._drain_s)
            await self._close(stream)
        except TimeoutError:
            logger.warning("dropped connection router=%s: it read nothing for %g s", request.router, self._drain_s)
        finally:
            del self._streams[stream]

    async def _reject(self, stream: MessageStream, error: ClusterError) -> None:
        stream.send(pb.Frame(error=str(error)).SerializeToString())
        await self._close(stream)

    async def _close(self, stream: MessageStream) -> None:
        """Close after the router has read the last frames, or after a timeout."""
        stream.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.wait({stream.ended})

    def _context(self) -> ssl.SSLContext | None:
        """Return the context of the current credentials. Raises OSError if they are unusable."""
        if (tls_credentials := self._identity.tls_credentials) is not self._tls_credentials:
            self._tls = server_context(tls_credentials) if tls_credentials else None
            self._tls_credentials = tls_credentials
        return self._tls


class _Outbox:
    """Next frame of one router."""

    def __init__(self) -> None:
        self.frame = pb.Frame()
        self.number = 0
        self.wake = asyncio.Event()
        self._is_plain = True  # no token of the frame has more than an id

    def add(self, tokens: Iterable[StreamToken]) -> None:
        streams, token_ids = list[int](), list[int]()
        for stream, token in tokens:
            # Plain tokens are read first. A stream's tokens must stay in order, so none follows one with details.
            self._is_plain &= token.logprob is None and token.finish_reason is None and token.drafts is None
            if self._is_plain:
                streams.append(stream)
                token_ids.append(token.token_id)
            else:
                add_stream_token(self.frame, stream, token)
        self.frame.plain_streams.extend(streams)
        self.frame.plain_token_ids.extend(token_ids)
        self.wake.set()

    def next_frame(self) -> pb.Frame:
        frame, self.frame = self.frame, pb.Frame()
        frame.number, self._is_plain = self.number, True
        self.number += 1
        return frame


def _peer(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername())
    except OSError:  # disconnected already
        return "unknown"


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
