"""Live migration of a running choice from one decode replica (S) to another (T).

1  router → T   Generate(continues): a lease on the target                    T: reserved(handoff)
2  router → S   Migrate(handoff): the source keeps decoding while it ships    S: moved after n tokens, or not moved
3  the client gets S's tokens up to n from the frames, then T's

A failed migration leaves everything as it was.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from core.rpc import worker_pb2 as pb
from core.types.errors import ClusterError, ReplicaLost
from core.types.request import SampledToken, SequenceRequest
from core.wire.messages import handoff_from_proto
from router.serving.grpc_worker import WorkerCall
from router.serving.replicas import Replica, TokenSink

logger = logging.getLogger(__name__)

Lease = WorkerCall[pb.GenerateEvent]


@dataclass(frozen=True)
class DecodeStream:
    """Token stream of a choice: its replica, and the stream's key there."""

    replica: Replica
    key: int


class ChoiceMove:
    """Migration of one choice from `source` to `target`. Unless `run` succeeds, the target is left clean."""

    def __init__(self, source: DecodeStream, target: DecodeStream) -> None:
        self.lease: Lease | None = None  # lease on the target
        self.wire_bytes = 0
        self._source = source
        self._target = target
        self._early: list[list[SampledToken] | ReplicaLost] = []  # target's tokens before `follow`
        self._sink: TokenSink | None = None

    async def run(self, request: SequenceRequest) -> int | None:
        """Migrate the choice. Return its number of tokens at the switch, or None if it stays on the source.

        request: the choice's request, with its tokens so far; the source may already have more.
        After success the tokens come from the target; `follow` sets their sink.
        """
        source, target = self._source.replica, self._target.replica
        has_moved = False
        try:
            target.subscribe(self._target.key, self._take)
            self.lease = target.worker.generate(request, continues=True)
            async for event in self.lease:
                if event.WhichOneof("event") == "reserved":
                    handoff = handoff_from_proto(event.reserved.handoff)
                    reply = await source.worker.migrate(self._source.key, handoff)
                    has_moved = reply.moved
                    if not has_moved:
                        logger.debug("move declined request=%s source=%s: %s", request.id, source.id, reply.reason)
                        return None
                    logger.info(
                        "request=%s moved from=%s to=%s tokens=%d bytes=%d pause_ms=%.1f",
                        request.id,
                        source.id,
                        target.id,
                        reply.num_tokens,
                        reply.wire_bytes,
                        reply.pause_s * 1e3,
                    )
                    self.wire_bytes = reply.wire_bytes
                    return reply.num_tokens
            return None
        except ClusterError as error:
            logger.warning("move failed request=%s: %s", request.id, error)
            return None
        finally:
            if not has_moved:
                target.unsubscribe(self._target.key)
                if self.lease:
                    self.lease.cancel()

    def follow(self, sink: TokenSink) -> None:
        """Pass the target's tokens to `sink` from now on, beginning with those already received."""
        self._sink = sink
        early, self._early = self._early, []
        for tokens in early:
            sink(tokens)

    def _take(self, tokens: list[SampledToken] | ReplicaLost) -> None:
        if self._sink:
            self._sink(tokens)
        else:
            self._early.append(tokens)
