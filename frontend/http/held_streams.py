"""Streamed answers that outlive their connection for a while, so that a client who lost it goes on where it was.

    POST /v1/…              X-Resume-Within: 30     ──>  id: 1 …  id: 2 …  (the connection is lost)
    GET /v1/streams/ID      Last-Event-ID: 1        ──>  id: 2 …  id: 3 …  data: [DONE]

Only who asks for it is waited for: else a client that goes away ends the work at once. What is waited for keeps its
key's place, and when it is full it is not computed further.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Scope, Send

from core.types.errors import RequestError, UnknownObject

WITHIN, AFTER = "x-resume-within", "last-event-id"
_MAX_BYTES = 512 << 10  # of one answer
_MAX_STREAMS, _MAX_OF_A_KEY = 128, 32  # of one router


class HeldStream:
    """The events of one answer, numbered from 1. Lives on the event loop; of its connections the last to come reads."""

    def __init__(
        self, within_s: float, *, max_bytes: int = _MAX_BYTES, on_left: Callable[[], object] = lambda: None
    ) -> None:
        """within_s: how long it waits for a connection. on_left: called once, when nobody wants it any more."""
        self.within_s = within_s
        self._max_bytes = max_bytes
        self._on_left = on_left
        self._start: Message | None = None  # the answer's status and headers
        self._events: deque[bytes] = deque()
        self._num_dropped = 0  # events before the first that is there
        self._num_bytes = 0
        self._unsent: list[bytes] = []  # the last of them: those that the last connection has not been given
        self._is_over = False
        self._is_left = False
        self._reader = 0  # the number of the connection that reads
        self._leaving: asyncio.TimerHandle | None = None
        self._making: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._change: asyncio.Future[None] = self._loop.create_future()  # of anything; then there is another

    @property
    def num_held(self) -> int:
        """Events."""
        return len(self._events)

    # ---- what makes the answer

    async def send(self, message: Message) -> None:
        """Implements starlette's Send. Waits while it is full of what nobody has read."""
        if message["type"] == "http.response.start":
            self._start = message
            if message["status"] != 200:
                self._forget()
        else:
            for event in self._cut(message.get("body", b"")):
                await self._put(event)
            self._is_over = not message.get("more_body", False)
        self._changed()

    async def outlive(self, making: Coroutine[Any, Any, None], playing: Coroutine[Any, Any, object]) -> None:
        """Make the answer, while it is played to the connection that asked for it; after the end of that, go on until
        it is made, or nobody wants it any more."""
        task = self._making = asyncio.ensure_future(making)
        task.add_done_callback(lambda _: self._changed())
        try:
            await playing
            await self._until(lambda: task.done() or self._is_left)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def leave(self) -> None:
        """Nobody wants it any more: it is not made further, whoever still reads."""
        self._forget()
        if self._making:
            self._making.cancel()

    def _forget(self) -> None:
        """Nobody can take it up any more."""
        if not self._is_left:
            self._is_left = True
            self._on_left()
            self._changed()

    # ---- connections

    async def play(self, send: Send, *, after: int = 0) -> None:
        """To a connection, from behind event `after` until the answer's end, or until another connection reads. Raises
        RequestError, and UnknownObject for events that are not here any more, or an answer that was ended before it
        began."""
        if not 0 <= after <= self._num_dropped + len(self._events):
            raise RequestError(f"{AFTER}: this answer has no event {after}", param=AFTER)
        if after < self._num_dropped:
            raise UnknownObject(f"{AFTER}: the events after {after} are not here any more; ask anew")
        self._reader += 1
        reader = self._reader
        self._unsent = list(self._events)[after - self._num_dropped :]
        if self._leaving:
            self._leaving.cancel()
        self._changed()  # for the connection before, and for who waits for room
        try:
            await self._until(lambda: self._start or self._is_left)
            if not self._start:
                raise UnknownObject("this answer was ended before it began")
            await send({**self._start, "headers": list(self._start["headers"])})
            while events := await self._after(reader):
                await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if reader == self._reader:
                self._leaving = self._loop.call_later(self.within_s, self.leave)

    async def _after(self, reader: int) -> list[bytes]:
        """What a connection has not been given; none: that was all, or it does not read any more."""
        await self._until(lambda: self._unsent or self._is_over or self._reader != reader or self._is_ended)
        if self._reader != reader:
            return []
        events, self._unsent = self._unsent, []
        self._changed()  # for who waits for room
        return events

    @property
    def _is_ended(self) -> bool:
        """By its client; what is refused is still told."""
        assert self._start
        return self._is_left and self._start["status"] == 200

    async def _put(self, event: bytes) -> None:
        while self._events and self._num_bytes + len(event) > self._max_bytes:
            await self._until(lambda: len(self._unsent) < len(self._events))  # only what was sent goes
            self._num_bytes -= len(self._events.popleft())
            self._num_dropped += 1
        self._events.append(event)
        self._unsent.append(event)
        self._num_bytes += len(event)

    def _cut(self, body: bytes) -> list[bytes]:
        """The events of what is sent together, each with its number; what is no stream stays as it is."""
        assert self._start, "a body without a head"
        if self._start["status"] != 200:
            return [body] if body else []
        first = self._num_dropped + len(self._events) + 1
        return [b"id: %d\n%b\n\n" % (i, event) for i, event in enumerate(body.split(b"\n\n")[:-1], first)]

    async def _until(self, is_so: Callable[[], object]) -> None:
        while not is_so():
            await asyncio.shield(self._change)

    def _changed(self) -> None:
        change, self._change = self._change, self._loop.create_future()
        change.set_result(None)


class HeldStreams:
    """Those of one router's door, by who asked and the request's id."""

    def __init__(self, max_within_s: float) -> None:
        """max_within_s: the longest that a client may ask for; 0: nobody is waited for."""
        self._max_within_s = max_within_s
        self._streams: dict[tuple[str, str], HeldStream] = {}

    def asked(self, scope: Scope) -> HeldStream | None:
        """For a new answer; None where it is not asked for, or where there is no room. Raises RequestError."""
        said = Headers(scope=scope).get(WITHIN)
        if said is None or not self._max_within_s:
            return None
        within_s = min(_seconds(said), self._max_within_s)
        place = _place(scope, scope["state"]["request_id"])
        if place in self._streams:
            raise RequestError(f"x-request-id: an answer with this id is held already; take another with {WITHIN}")
        num_of_key = sum(key == place[0] for key, _ in self._streams)
        if len(self._streams) >= _MAX_STREAMS or num_of_key >= _MAX_OF_A_KEY:
            return None
        held = self._streams[place] = HeldStream(within_s, on_left=lambda: self._streams.pop(place))
        return held

    def find(self, scope: Scope, request_id: str) -> HeldStream:
        """Raises UnknownObject."""
        if found := self._streams.get(_place(scope, request_id)):
            return found
        raise UnknownObject(f"no stream {request_id!r} is held here: it was not asked for, or its time is over")


def number_after(scope: Scope) -> int:
    """Of the last event that a client has. Raises RequestError."""
    said = Headers(scope=scope).get(AFTER) or "0"
    if not (said.isascii() and said.isdigit() and len(said) < 10):
        raise RequestError(f"{AFTER}: must be the number of an event, not {said[:20]!r}", param=AFTER)
    return int(said)


def _seconds(said: str) -> float:
    if not (said.isascii() and said.isdigit() and len(said) < 10 and int(said)):
        raise RequestError(f"{WITHIN}: must be a whole number of seconds above 0, not {said[:20]!r}", param=WITHIN)
    return float(said)


def _place(scope: Scope, request_id: str) -> tuple[str, str]:
    return scope["state"]["client"].key_id, request_id
