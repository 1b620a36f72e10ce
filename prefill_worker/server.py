"""The gRPC face of a prefill replica towards routers; the event loop's side of the step loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

from grpc import aio

from cluster.rpc import worker_pb2 as pb
from cluster.rpc import worker_pb2_grpc as rpc
from cluster.wire.channel import abort_with
from cluster.wire.messages import handoff_from_proto, holder_from_proto, sequence_from_proto, tokens_to_proto
from cluster.words.errors import ClusterError, ReplicaLost
from cluster.words.handoff import Handoff
from cluster.words.request import SampledToken
from cluster.worker.role_parts import LiveReplica
from engine.prompts import Prompt
from kvtransfer.protocol.passage import Shipment
from prefill_worker.worker import PrefillWorker

_Context: TypeAlias = aio.ServicerContext[Any, Any]


class PrefillServicer(rpc.PrefillWorkerServicer):
    """One call per prompt. Serves once `replica` is there."""

    def __init__(self) -> None:
        self.replica: LiveReplica[PrefillWorker] | None = None

    async def Prefill(self, request: pb.PrefillRequest, context: _Context) -> AsyncIterator[pb.PrefillEvent]:
        replica = self.replica
        if replica is None or replica.service.is_draining:
            await abort_with(context, ReplicaLost("this replica takes no new work"))
        handoff = handoff_from_proto(request.handoff) if request.HasField("handoff") else None
        sequence = replica.sequence_of(sequence_from_proto(request.sequence))
        prompt = Prompt(sequence, fetch_only=request.fetch_only)
        holder = holder_from_proto(request.holder) if request.HasField("holder") else None
        call = _Call(prompt, handoff)
        replica.service.post(lambda: replica.worker.submit(prompt, handoff, call, holder=holder))
        try:
            while (event := await call.events.get()) is not None:
                if isinstance(event, ClusterError):
                    await abort_with(context, event)
                yield event
        finally:
            replica.service.post(lambda: replica.worker.cancel(prompt))


class _Call:
    """Brings what happens to a prompt from the step thread to the call that waits for it."""

    def __init__(self, prompt: Prompt, handoff: Handoff | None) -> None:
        self.events: asyncio.Queue[pb.PrefillEvent | ClusterError | None] = asyncio.Queue()
        self._prompt = prompt
        self._handoff = handoff
        self._loop = asyncio.get_running_loop()

    def first_tokens(self, tokens: list[SampledToken]) -> None:
        prompt = self._prompt
        first_tokens = pb.FirstTokens(
            tokens=tokens_to_proto(tokens),
            cached_tokens=prompt.num_cached + prompt.num_loaded,
            pulled_tokens=prompt.num_fetched - prompt.num_loaded,
        )
        self._put(pb.PrefillEvent(first_tokens=first_tokens))

    def ended(self, shipment: Shipment | None, error: ClusterError | None) -> None:
        if shipment:
            self._put(pb.PrefillEvent(shipped=self._shipped(shipment)))
        self._put(error)

    def _shipped(self, shipment: Shipment) -> pb.Shipped:
        assert self._handoff
        blocks = self._prompt.sequence.num_blocks_for(self._handoff.num_missing_tokens)
        return pb.Shipped(blocks=blocks, wire_bytes=shipment.wire_bytes, seconds=shipment.seconds)

    def _put(self, event: pb.PrefillEvent | ClusterError | None) -> None:
        self._loop.call_soon_threadsafe(self.events.put_nowait, event)
