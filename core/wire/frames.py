"""Token frames of one worker: the output of its step loop, bundled per router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping

from core.rpc import worker_pb2 as pb
from core.types.errors import CapacityError
from core.types.request import SampledToken
from core.wire.messages import stream_token_to_proto

HEARTBEAT_S = 1.0
# Maximum age of a replica's status at the routers while its set of requests is unchanged. Sending it with each token
# would take 0.2 ms between two steps, and time on each router.
STATUS_S = 0.05
MAX_ROUTERS = 1024

StreamToken = tuple[int, SampledToken]  # (key of the stream, its next token)


class FrameHub:
    """Outgoing tokens per router, at most one frame per step, and the worker's status when it changes.

    Lives on the event loop. A slow router gets fewer and larger frames. Tokens are never dropped while a router's
    stream is open, and never stored without one.
    """

    def __init__(self) -> None:
        self._outboxes: dict[str, _Outbox] = {}
        self._status = pb.Status()
        self._is_closed = False

    def close(self) -> None:
        """End every router's stream, because this worker failed."""
        self._is_closed = True
        for outbox in self._outboxes.values():
            outbox.wake.set()

    def publish(self, tokens: Mapping[str, Iterable[StreamToken]], status: pb.Status | None = None) -> None:
        """Add tokens to each router's next frame; send a changed status to every router."""
        if status is not None and status != self._status:
            self._status = status
            for outbox in self._outboxes.values():
                outbox.frame.status.CopyFrom(status)
                outbox.wake.set()
        for router, streams in tokens.items():
            if router in self._outboxes:
                self._outboxes[router].add(streams)

    def num_frames(self, router: str) -> int:
        """Return how many frames carry everything published for this router so far; 0: no open stream."""
        outbox = self._outboxes.get(router)
        return outbox.number + 1 if outbox else 0

    async def frames(self, router: str) -> AsyncGenerator[pb.Frame, None]:
        """Yield this router's frames. A second stream of the same router replaces the first.

        Raises CapacityError if too many routers are connected.
        """
        if len(self._outboxes) >= MAX_ROUTERS and router not in self._outboxes:
            raise CapacityError(f"{MAX_ROUTERS} routers are connected, the maximum; try again later")
        outbox = self._outboxes[router] = _Outbox()
        outbox.frame.status.CopyFrom(self._status)
        outbox.wake.set()
        try:
            while self._outboxes.get(router) is outbox and not self._is_closed:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await outbox.wake.wait()
                except TimeoutError:
                    pass  # send an empty frame as a heartbeat
                outbox.wake.clear()
                yield outbox.next_frame()
        finally:
            if self._outboxes.get(router) is outbox:
                del self._outboxes[router]


class _Outbox:
    """Next frame of one router."""

    def __init__(self) -> None:
        self.frame = pb.Frame()
        self.number = 0
        self.wake = asyncio.Event()
        self._plain: list[StreamToken] = []
        self._rich: list[pb.StreamTokens] = []  # tokens with more than an id, sent after the plain ones

    def add(self, tokens: Iterable[StreamToken]) -> None:
        for stream, token in tokens:
            # Once a rich token is queued, all later ones are: a stream's tokens must stay in order.
            if not self._rich and token.is_plain:
                self._plain.append((stream, token))
            else:
                self._rich.append(stream_token_to_proto(stream, token))
        self.wake.set()

    def next_frame(self) -> pb.Frame:
        frame, self.frame = self.frame, pb.Frame()
        plain, self._plain = self._plain, []
        rich, self._rich = self._rich, []
        frame.number = self.number
        frame.plain_streams.extend([stream for stream, _ in plain])
        frame.plain_token_ids.extend([token.token_id for _, token in plain])
        frame.streams.extend(rich)
        self.number += 1
        return frame
