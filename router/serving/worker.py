"""Interface of a replica to its router, implemented over proto/worker.proto and by a fake in tests.

Both roles implement `follow` and `close`; a prefill replica also `prefill`, a decode replica the rest. Requests are
passed as core types; events are protobuf messages. Every failure raises ClusterError: the replica's own error,
ReplicaLost if the replica cannot be reached, DeadlineExceeded after `timeout_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from core.rpc import worker_pb2 as pb
from core.types.handoff import Handoff, PrefixSource
from core.types.request import SequenceRequest

Event_co = TypeVar("Event_co", covariant=True)


class WorkerCall(Protocol[Event_co]):
    """Running call; ends when it is cancelled or its events end. Iterate it from one task at a time."""

    def __aiter__(self) -> WorkerCall[Event_co]: ...
    async def __anext__(self) -> Event_co: ...

    def cancel(self) -> None:
        """Cancel the call. Idempotent, also after its end."""
        ...


class Worker(Protocol):
    """Connection from a router to one replica."""

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
        """Compute a prompt and ship its KV along the handoff; without a handoff, return only the first tokens.

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

        continues: the KV comes from the decode replica that currently runs the choice.
        """
        ...

    async def migrate(self, stream: int, handoff: Handoff) -> pb.MigrateReply:
        """Ship a running choice to the replica that issued the handoff. If cancelled, the choice stays."""
        ...

    async def stop(self, streams: Sequence[int], *, timeout_s: float) -> None:
        """Stop generating for these streams."""
        ...

    async def close(self) -> None: ...
