"""The gRPC face of a replica towards others that lack a prefix which it holds."""

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
from kvtransfer.transfer.serve_fetches import Grants


@dataclass(frozen=True)
class Granting:
    """A replica that is up. `post` runs a command on its step thread, which owns the grants."""

    grants: Grants
    layout: KVLayout
    post: Callable[[Callable[[], None]], None]


class PullServicer(rpc.PrefixHolderServicer):
    """One call per prefix, at its holder. Serves once `granting` is there."""

    def __init__(self) -> None:
        self.granting: Granting | None = None

    async def Pull(
        self, request: pb.PullRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PullEvent]:
        granting = self.granting
        if granting is None:
            await abort_with(context, ReplicaLost("this replica serves nothing yet"))
        handoff, size = handoff_from_proto(request.handoff), granting.layout.block_size
        try:
            check_handoff(handoff, granting.layout)
            check(len(request.hashes) * size == handoff.max_tokens * HASH_BYTES, "hashes", "must reach to max_tokens")
        except ClusterError as error:
            await abort_with(context, error)
        hashes = [request.hashes[i : i + HASH_BYTES] for i in range(0, len(request.hashes), HASH_BYTES)]
        grant = _Grant(handoff.first_token)
        granting.post(lambda: granting.grants.give(handoff, hashes, grant))
        try:
            async for event in grant.events:
                yield event
        except ClusterError as error:
            await abort_with(context, error)
        finally:
            granting.post(lambda: granting.grants.cancel(grant))


class _Grant:
    """Brings what happens to a grant from the step thread to the call that waits for it."""

    def __init__(self, first_token: int) -> None:
        self.events: CallEvents[pb.PullEvent] = CallEvents()
        self._first_token = first_token

    def granted(self, num_tokens: int) -> None:
        self.events.put(pb.PullEvent(granted=pb.Granted(num_tokens=num_tokens)))
        if num_tokens <= self._first_token:
            self.events.end()

    def ended(self, shipment: Shipment | None, error: TransferError | None) -> None:
        if shipment:
            shipped = pb.Shipped(wire_bytes=shipment.wire_bytes, seconds=shipment.seconds)
            self.events.put(pb.PullEvent(shipped=shipped))
        self.events.end(error)
