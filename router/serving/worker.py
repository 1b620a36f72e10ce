"""What a router asks of one replica, over proto/worker.proto or, in tests, of a fake.

Both roles answer `follow` and `close`; a prefill replica `prefill`, a decode replica the rest. Requests go in as our
own words, and what comes back is read from the messages as they came. Whatever goes wrong is a ClusterError: the
replica's own, ReplicaLost where it could not even answer, DeadlineExceeded where a `timeout_s` has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from core.rpc import worker_pb2 as pb
from core.types.handoff import Handoff, PrefixSource
from core.types.request import SequenceRequest

Event_co = TypeVar("Event_co", covariant=True)


class WorkerCall(Protocol[Event_co]):
    """A call that is under way until it is cancelled or its events end. Iterate it in one task at a time."""

    def __aiter__(self) -> WorkerCall[Event_co]: ...
    async def __anext__(self) -> Event_co: ...

    def cancel(self) -> None:
        """The replica may forget it. Any number of times, also after its end."""
        ...


class Worker(Protocol):
    """One replica, as far as its router can reach it."""

    async def follow(self, take: Callable[[pb.Frame], None]) -> None:
        """Hand each frame to `take`: the replica's status and the tokens of all our requests there, at least once a
        second. Returns when the replica closes the stream; raises what `take` raises."""
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
        """Compute a prompt and ship it along the handoff; without one only the first tokens are wanted.

        fetch_only: take over what the holder has and compute nothing.
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
        """A lease: the replica holds blocks for the request, and generates, while the call lives.

        continues: the KV comes from the decode replica that runs the choice now.
        """
        ...

    async def migrate(self, stream: int, handoff: Handoff) -> pb.MigrateReply:
        """Ship a choice that runs there to whoever made the handoff. Cancelled: the choice stays."""
        ...

    async def stop(self, streams: Sequence[int], *, timeout_s: float) -> None:
        """These choices need no more tokens."""
        ...

    async def close(self) -> None: ...
