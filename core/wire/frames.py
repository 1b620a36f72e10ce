"""The token frames of one worker: what its step loop produces, bundled per router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping

from core.rpc import worker_pb2 as pb
from core.types.errors import CapacityError
from core.types.request import SampledToken
from core.wire.messages import stream_token_to_proto

HEARTBEAT_S = 1.0
# How old what routers know of a replica may be while the same requests live on it. To tell it with each token takes 0.2
# ms between two steps, and something of each router, too.
STATUS_S = 0.05
MAX_ROUTERS = 1024

StreamToken = tuple[int, SampledToken]  # the key of a stream, and its next token


class FrameHub:
    """Hands each router its tokens, at most one frame per step, and the worker's status when it changes.

    Lives on the event loop. A router that reads slowly gets fewer and larger frames; nothing is ever dropped while its
    stream lives, and nothing is kept for a router without a stream.
    """

    def __init__(self) -> None:
        self._outboxes: dict[str, _Outbox] = {}
        self._status = pb.Status()
        self._is_closed = False

    def close(self) -> None:
        """End every router's stream: this worker cannot go on, whatever its event loop still answers."""
        self._is_closed = True
        for outbox in self._outboxes.values():
            outbox.wake.set()

    def publish(self, tokens: Mapping[str, Iterable[StreamToken]], status: pb.Status | None = None) -> None:
        """Add tokens to each router's next frame; a new status goes to every router."""
        if status is not None and status != self._status:
            self._status = status
            for outbox in self._outboxes.values():
                outbox.frame.status.CopyFrom(status)
                outbox.wake.set()
        for router, streams in tokens.items():
            if router in self._outboxes:
                self._outboxes[router].add(streams)

    def num_frames(self, router: str) -> int:
        """So many have, or soon will have, all that was published for this router; 0: it does not listen."""
        outbox = self._outboxes.get(router)
        return outbox.number + 1 if outbox else 0

    async def frames(self, router: str) -> AsyncGenerator[pb.Frame, None]:
        """Yield this router's frames. A second stream of the same router takes the place of the first.

        Raises CapacityError where too many routers listen.
        """
        if len(self._outboxes) >= MAX_ROUTERS and router not in self._outboxes:
            raise CapacityError(f"{MAX_ROUTERS} routers listen already")
        outbox = self._outboxes[router] = _Outbox()
        outbox.frame.status.CopyFrom(self._status)
        outbox.wake.set()
        try:
            while self._outboxes.get(router) is outbox and not self._is_closed:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await outbox.wake.wait()
                except TimeoutError:
                    pass  # an empty frame: we are alive
                outbox.wake.clear()
                yield outbox.next_frame()
        finally:
            if self._outboxes.get(router) is outbox:
                del self._outboxes[router]


class _Outbox:
    """The next frame of one router."""

    def __init__(self) -> None:
        self.frame = pb.Frame()
        self.number = 0
        self.wake = asyncio.Event()
        self._plain: list[StreamToken] = []
        self._told: list[pb.StreamTokens] = []  # behind those

    def add(self, tokens: Iterable[StreamToken]) -> None:
        for stream, token in tokens:
            # Behind a token that says more none is plain: it may be of the same stream.
            if not self._told and token.is_plain:
                self._plain.append((stream, token))
            else:
                self._told.append(stream_token_to_proto(stream, token))
        self.wake.set()

    def next_frame(self) -> pb.Frame:
        frame, self.frame = self.frame, pb.Frame()
        plain, self._plain = self._plain, []
        told, self._told = self._told, []
        frame.number = self.number
        frame.plain_streams.extend([stream for stream, _ in plain])
        frame.plain_token_ids.extend([token.token_id for _, token in plain])
        frame.streams.extend(told)
        self.number += 1
        return frame
