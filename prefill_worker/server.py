"""The gRPC face of a prefill replica towards routers; the event loop's side of the step loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc import aio

from cluster.channel import abort_with
from cluster.errors import ClusterError, ReplicaLost
from cluster.frames import FrameHub
from cluster.messages import handoff_from_proto, sequence_from_proto, tokens_to_proto
from cluster.request import SampledToken
from cluster.rpc import worker_pb2 as pb
from cluster.rpc import worker_pb2_grpc as rpc
from engine.sequence import Sequence
from kvtransfer.sender import Shipment
from prefill_worker.replica import PrefillReplica
from prefill_worker.scheduler import Job

_Context = aio.ServicerContext[Any, Any]


class WorkerServicer(rpc.WorkerServicer):
    """The token frames; a prefill replica's carry its status only."""

    def __init__(self, hub: FrameHub) -> None:
        self._hub = hub

    async def Frames(self, request: pb.FramesRequest, context: _Context) -> AsyncIterator[pb.Frame]:
        async for frame in self._hub.frames(request.router):
            yield frame


class PrefillServicer(rpc.PrefillWorkerServicer):
    """One call per prompt. Serves once `replica` is there."""

    def __init__(self) -> None:
        self.replica: PrefillReplica | None = None

    async def Prefill(self, request: pb.PrefillRequest, context: _Context) -> AsyncIterator[pb.PrefillEvent]:
        if self.replica is None or self.replica.is_draining:
            await abort_with(context, ReplicaLost("this replica takes no new work"))
        handoff = handoff_from_proto(request.handoff) if request.HasField("handoff") else None
        job = Job(self.replica.sequence(sequence_from_proto(request.sequence)), handoff)
        call = _Call(job)
        self.replica.submit(job, call)
        try:
            while (event := await call.events.get()) is not None:
                if isinstance(event, ClusterError):
                    await abort_with(context, event)
                yield event
        finally:
            self.replica.cancel(job)


class _Call:
    """Brings what happens to a job from the step thread to the call that waits for it."""

    def __init__(self, job: Job) -> None:
        self.events: asyncio.Queue[pb.PrefillEvent | ClusterError | None] = asyncio.Queue()
        self._job = job
        self._loop = asyncio.get_running_loop()

    def first_tokens(self, tokens: list[SampledToken], num_cached: int) -> None:
        first_tokens = pb.FirstTokens(tokens=tokens_to_proto(tokens), cached_tokens=num_cached)
        self._put(pb.PrefillEvent(first_tokens=first_tokens))

    def ended(self, shipment: Shipment | None, error: ClusterError | None) -> None:
        if shipment:
            self._put(pb.PrefillEvent(shipped=self._shipped(shipment, self._job.sequence)))
        self._put(error)

    def _shipped(self, shipment: Shipment, sequence: Sequence) -> pb.Shipped:
        assert self._job.handoff
        blocks = sequence.num_blocks_for(self._job.handoff.num_missing_tokens)
        return pb.Shipped(blocks=blocks, wire_bytes=shipment.wire_bytes, seconds=shipment.seconds)

    def _put(self, event: pb.PrefillEvent | ClusterError | None) -> None:
        self._loop.call_soon_threadsafe(self.events.put_nowait, event)
