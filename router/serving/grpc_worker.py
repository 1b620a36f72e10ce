"""Connection from a router to a worker: its interface, and the client over gRPC and token frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import grpc
from grpc import aio

from core.identity.credentials import Identity
from core.index.membership import Member
from core.rpc import worker_pb2 as pb
from core.rpc import worker_pb2_grpc as rpc
from core.types.errors import ClusterError, DeadlineExceeded
from core.types.handoff import Handoff, PrefixSource
from core.types.request import SequenceRequest
from core.wire.call_errors import error_of
from core.wire.channel import open_lasting_channel
from core.wire.frames import follow_frames
from core.wire.messages import sequence_to_proto, to_message

Event = TypeVar("Event")
Event_co = TypeVar("Event_co", covariant=True)


class WorkerCall(Protocol[Event_co]):
    """Running call; ends when it is cancelled or its events end. Iterate it from one task at a time."""

    def __aiter__(self) -> WorkerCall[Event_co]: ...
    async def __anext__(self) -> Event_co: ...

    def cancel(self) -> None:
        """Cancel the call. Idempotent, also after its end."""
        ...


class Worker(Protocol):
    """Connection from a router to one replica, implemented over proto/worker.proto and by a fake in tests.

    Only a prefill replica has `prefill`; its `generate` is for local decodes. Requests are passed as core types; events
    are protobuf messages. Every failure raises ClusterError: the replica's own error, ReplicaLost if the replica cannot
    be reached, DeadlineExceeded after `timeout_s`.
    """

    async def follow(self, take: Callable[[pb.Frame], None]) -> None:
        """Pass each frame to `take`, at least once per second: the replica's status and this router's tokens.

        Returns when the replica closes the connection. Also raises the errors of `take`.
        """
        ...

    def prefill(
        self,
        request: SequenceRequest,
        *,
        handoff: Handoff | None = None,
        prefix_source: PrefixSource | None = None,
        fetch_only: bool = False,
        timeout_s: float | None = None,
    ) -> WorkerCall[pb.PrefillEvent]:
        """Compute a prompt and ship its KV to fill the handoff; without a handoff, return only the first tokens.

        fetch_only: fetch the blocks of the prefix source and compute nothing.
        """
        ...

    def generate(
        self,
        request: SequenceRequest,
        *,
        prefill_here: bool = False,
        continues: bool = False,
        prefix_source: PrefixSource | None = None,
        timeout_s: float | None = None,
    ) -> WorkerCall[pb.GenerateEvent]:
        """Open a lease: the replica holds blocks for the request and generates while the call lives.

        continues: the KV comes from the decode replica that runs the request's choice so far.
        """
        ...

    async def migrate(self, stream: int, handoff: Handoff) -> pb.MigrateReply:
        """Ship a running choice to the replica that issued the handoff. If cancelled, the choice stays."""
        ...

    async def stop(self, streams: Sequence[int], *, timeout_s: float) -> None:
        """Stop the choices with these stream keys; see SequenceRequest.stream."""
        ...

    async def close(self) -> None: ...


class GrpcWorker:
    """gRPC implementation of Worker. Connects on first use."""

    def __init__(self, member: Member, *, identity: Identity) -> None:
        """identity: identity of this router; the worker keeps one token stream per router."""
        self._replica = member.replica
        self._router = identity.name.router
        self._frames_address = member.frames_address
        self._peer = identity.rank(member.replica, 0)
        self._identity = identity
        self._channel = open_lasting_channel(member.address, peer=self._peer, identity=identity)

    async def follow(self, take: Callable[[pb.Frame], None]) -> None:
        await follow_frames(self._frames_address, peer=self._peer, identity=self._identity, take=take)

    def prefill(
        self,
        request: SequenceRequest,
        *,
        handoff: Handoff | None = None,
        prefix_source: PrefixSource | None = None,
        fetch_only: bool = False,
        timeout_s: float | None = None,
    ) -> GrpcCall[pb.PrefillEvent]:
        message = pb.PrefillRequest(
            sequence=sequence_to_proto(request),
            handoff=to_message(pb.Handoff, handoff) if handoff else None,
            prefix_source=to_message(pb.PrefixSource, prefix_source) if prefix_source else None,
            fetch_only=fetch_only,
        )
        call = rpc.PrefillWorkerStub(self._channel).Prefill(message, timeout=timeout_s, metadata=_trace_of(request))
        return GrpcCall(call, self._replica, request, timeout_s)

    def generate(
        self,
        request: SequenceRequest,
        *,
        prefill_here: bool = False,
        continues: bool = False,
        prefix_source: PrefixSource | None = None,
        timeout_s: float | None = None,
    ) -> GrpcCall[pb.GenerateEvent]:
        message = pb.GenerateRequest(
            sequence=sequence_to_proto(request),
            router=self._router,
            prefill_here=prefill_here,
            continues=continues,
            prefix_source=to_message(pb.PrefixSource, prefix_source) if prefix_source else None,
        )
        call = rpc.DecodeWorkerStub(self._channel).Generate(message, timeout=timeout_s, metadata=_trace_of(request))
        return GrpcCall(call, self._replica, request, timeout_s)

    async def migrate(self, stream: int, handoff: Handoff) -> pb.MigrateReply:
        message = pb.MigrateRequest(router=self._router, stream=stream, handoff=to_message(pb.Handoff, handoff))
        try:
            reply: pb.MigrateReply = await rpc.DecodeWorkerStub(self._channel).Migrate(message, timeout=handoff.ttl_s)
        except aio.AioRpcError as error:
            raise error_of(error, peer=self._replica) from error
        return reply

    async def stop(self, streams: Sequence[int], *, timeout_s: float) -> None:
        message = pb.StopRequest(router=self._router, streams=streams)
        try:
            await rpc.DecodeWorkerStub(self._channel).Stop(message, timeout=timeout_s)
        except aio.AioRpcError as error:
            raise error_of(error, peer=self._replica) from error

    async def close(self) -> None:
        await self._channel.close()


def _trace_of(request: SequenceRequest) -> tuple[tuple[str, str], ...] | None:
    """Return call metadata with the request's `traceparent`, for proxies and the replica's log."""
    return (("traceparent", request.traceparent),) if request.traceparent else None


class GrpcCall(Generic[Event]):
    """gRPC implementation of WorkerCall."""

    def __init__(
        self,
        call: aio.UnaryStreamCall,
        peer: str,
        request: SequenceRequest,
        timeout_s: float | None,
    ) -> None:
        self._call = call
        self._events = aiter(call)
        self._peer = peer
        self._request = request
        self._timeout_s = timeout_s

    def __aiter__(self) -> GrpcCall[Event]:
        return self

    async def __anext__(self) -> Event:
        try:
            event: Event = await anext(self._events)
        except aio.AioRpcError as error:
            raise self._error_of(error) from error
        return event

    def cancel(self) -> None:
        self._call.cancel()

    def _error_of(self, error: aio.AioRpcError) -> ClusterError:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and self._timeout_s is not None:
            return DeadlineExceeded(f"request {self._request.id}: not finished within its deadline")
        return error_of(error, peer=self._peer)
