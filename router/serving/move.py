"""Moving a running choice from one decode replica to another, while its stream goes on.

1  router → T   Generate(continues): a lease on the target          T: reserved(handoff)
2  router → S   Migrate(handoff): the source goes on and ships      S: moved, after so many tokens; or it stays
3  tokens of S up to that number, in the frames; then those of T

A move that does not come about leaves everything as it was.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from grpc import aio

from cluster.rpc import worker_pb2 as pb
from cluster.rpc import worker_pb2_grpc as rpc
from cluster.wire.channel import error_of
from cluster.wire.messages import sequence_to_proto
from cluster.words.errors import ReplicaLost
from cluster.words.request import SampledToken, SequenceRequest
from router.serving.replicas import Replica, TokenSink

logger = logging.getLogger(__name__)

Lease = Any  # the Generate call, aio.UnaryStreamCall, which grpc does not type


@dataclass(frozen=True)
class Place:
    """Where a choice runs, and the key of its tokens there."""

    replica: Replica
    stream: int


class ChoiceMove:
    """One choice on its way from `source` to `target`. Leaves nothing behind on the target unless `run` succeeds."""

    def __init__(self, source: Place, target: Place, *, router: str) -> None:
        self.lease: Lease | None = None  # on the target
        self._source = source
        self._target = target
        self._router = router
        self._early: list[list[SampledToken] | ReplicaLost] = []  # of the target, before the source's last
        self._sink: TokenSink | None = None

    async def run(self, request: SequenceRequest) -> int | None:
        """Ship the choice, which has at least the tokens of `request`. How many it had when it left, or None: it stays.

        Afterwards its tokens come from the target: `follow` says where to.
        """
        target = self._target.replica
        target.subscribe(self._target.stream, self._take)
        has_moved = False
        try:
            self.lease = rpc.DecodeWorkerStub(target.channel).Generate(
                pb.GenerateRequest(sequence=sequence_to_proto(request), router=self._router, continues=True)
            )
            async for event in self.lease:
                if event.WhichOneof("event") == "reserved":
                    reply = await self._migrate(event.reserved.handoff)
                    has_moved = reply.moved
                    if not has_moved:
                        logger.debug("request=%s stays on %s: %s", request.id, self._source.replica.id, reply.reason)
                        return None
                    logger.info(
                        "request=%s moved from=%s to=%s tokens=%d bytes=%d pause_ms=%.1f",
                        request.id,
                        self._source.replica.id,
                        target.id,
                        reply.num_tokens,
                        reply.wire_bytes,
                        reply.pause_s * 1e3,
                    )
                    return reply.num_tokens
            return None
        except aio.AioRpcError as error:
            logger.warning("request=%s cannot move: %s", request.id, error_of(error, peer=target.id))
            return None
        finally:
            if not has_moved:
                target.unsubscribe(self._target.stream)
                if self.lease:
                    self.lease.cancel()

    def follow(self, sink: TokenSink) -> None:
        """From now on hand the target's tokens to `sink`, beginning with those that have come already."""
        self._sink = sink
        early, self._early = self._early, []
        for tokens in early:
            sink(tokens)

    async def _migrate(self, handoff: pb.Handoff) -> pb.MigrateReply:
        request = pb.MigrateRequest(router=self._router, stream=self._source.stream, handoff=handoff)
        stub = rpc.DecodeWorkerStub(self._source.replica.channel)
        reply: pb.MigrateReply = await stub.Migrate(request, timeout=handoff.ttl_s)
        return reply

    def _take(self, tokens: list[SampledToken] | ReplicaLost) -> None:
        if self._sink:
            self._sink(tokens)
        else:
            self._early.append(tokens)


async def hold(lease: Lease, *, peer: str) -> None:
    """Keep a lease until it ends by itself. Raises ClusterError when its replica cannot go on."""
    try:
        async for _ in lease:
            pass
    except aio.AioRpcError as error:
        raise error_of(error, peer=peer) from error
