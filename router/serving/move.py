"""Moving a running choice from one decode replica to another, while its stream goes on.

1  router → T   Generate(continues): a lease on the target          T: reserved(handoff)
2  router → S   Migrate(handoff): the source goes on and ships      S: moved, after so many tokens; or it stays
3  tokens of S up to that number, in the frames; then those of T

A move that does not come about leaves everything as it was.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from core.rpc import worker_pb2 as pb
from core.types.errors import ClusterError, ReplicaLost
from core.types.request import SampledToken, SequenceRequest
from core.wire.messages import handoff_from_proto
from router.serving.replica import Replica, TokenSink
from router.serving.worker import WorkerCall

logger = logging.getLogger(__name__)

Lease = WorkerCall[pb.GenerateEvent]


@dataclass(frozen=True)
class DecodeStream:
    """Where a choice runs, and the key of its tokens there."""

    replica: Replica
    key: int


class ChoiceMove:
    """One choice on its way from `source` to `target`. Leaves nothing behind on the target unless `run` succeeds."""

    def __init__(self, source: DecodeStream, target: DecodeStream) -> None:
        self.lease: Lease | None = None  # on the target
        self.wire_bytes = 0
        self._source = source
        self._target = target
        self._early: list[list[SampledToken] | ReplicaLost] = []  # of the target, before the source's last
        self._sink: TokenSink | None = None

    async def run(self, request: SequenceRequest) -> int | None:
        """Ship the choice, which has at least the tokens of `request`. How many it had when it left, or None: it stays.

        Afterwards its tokens come from the target: `follow` says where to.
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
                        logger.debug("request=%s stays on %s: %s", request.id, source.id, reply.reason)
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
            logger.warning("request=%s cannot move: %s", request.id, error)
            return None
        finally:
            if not has_moved:
                target.unsubscribe(self._target.key)
                if self.lease:
                    self.lease.cancel()

    def follow(self, sink: TokenSink) -> None:
        """From now on hand the target's tokens to `sink`, beginning with those that have come already."""
        self._sink = sink
        early, self._early = self._early, []
        for tokens in early:
            sink(tokens)

    def _take(self, tokens: list[SampledToken] | ReplicaLost) -> None:
        if self._sink:
            self._sink(tokens)
        else:
            self._early.append(tokens)
