"""gRPC service that ships cached prefixes to other replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from grpc import aio

from core.rpc import worker_pb2 as pb
from core.rpc import worker_pb2_grpc as rpc
from core.types.errors import ClusterError, ReplicaLost, TransferError
from core.types.prefix_hash import HASH_BYTES
from core.types.validation import check
from core.wire.call_errors import abort_with
from core.wire.messages import handoff_from_proto
from core.wire.thread_events import CallEvents
from engine.kv.layout import KVLayout
from kvtransfer.protocol.rank_transfer import Shipment
from kvtransfer.protocol.validation import check_handoff
from kvtransfer.transfer.serve_fetches import ServedFetches


@dataclass(frozen=True)
class FetchServing:
    """Fetch serving of a ready replica. `post` runs a command on the step thread, which owns `served_fetches`."""

    served_fetches: ServedFetches
    layout: KVLayout
    post: Callable[[Callable[[], None]], None]


class FetchServicer(rpc.PrefixFetchServicer):
    """Servicer on the source replica, one call per prefix. Serves once `fetch_serving` is set."""

    def __init__(self) -> None:
        self.fetch_serving: FetchServing | None = None

    async def Fetch(
        self, request: pb.FetchRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.FetchEvent]:
        fetch_serving = self.fetch_serving
        if fetch_serving is None:
            await abort_with(context, ReplicaLost("this replica is not ready to serve fetches"))
        handoff, size = handoff_from_proto(request.handoff), fetch_serving.layout.block_size
        try:
            check_handoff(handoff, fetch_serving.layout)
            check(len(request.hashes) * size == handoff.max_tokens * HASH_BYTES, "hashes", "must reach to max_tokens")
        except ClusterError as error:
            await abort_with(context, error)
        hashes = [request.hashes[i : i + HASH_BYTES] for i in range(0, len(request.hashes), HASH_BYTES)]
        served_fetch = _ServedFetch(handoff.first_token)
        fetch_serving.post(lambda: fetch_serving.served_fetches.give(handoff, hashes, served_fetch))
        try:
            async for event in served_fetch.events:
                yield event
        except ClusterError as error:
            await abort_with(context, error)
        finally:
            fetch_serving.post(lambda: fetch_serving.served_fetches.cancel(served_fetch))


class _ServedFetch:
    """Listener that passes events of a served fetch from the step thread to its gRPC call."""

    def __init__(self, first_token: int) -> None:
        self.events: CallEvents[pb.FetchEvent] = CallEvents()
        self._first_token = first_token

    def granted(self, num_tokens: int) -> None:
        self.events.put(pb.FetchEvent(granted=pb.FetchServed(num_tokens=num_tokens)))
        if num_tokens <= self._first_token:
            self.events.end()

    def ended(self, shipment: Shipment | None, error: TransferError | None) -> None:
        if shipment:
            shipped = pb.Shipped(wire_bytes=shipment.wire_bytes, seconds=shipment.seconds)
            self.events.put(pb.FetchEvent(shipped=shipped))
        self.events.end(error)
