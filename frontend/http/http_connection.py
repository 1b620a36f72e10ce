"""One client's connection to an HTTP listener: uvicorn's, within limits.

waiting  for the header of a request: from the first moment, and again after each answer
busy     from the end of a header until that request, and those that were sent behind it, have been answered
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from email.utils import formatdate
from functools import cache, lru_cache
from http import HTTPStatus

from uvicorn._types import ASGISendEvent
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from frontend.http.connections import ConnectionLimits
from frontend.http.json_response import to_json
from frontend.openai.errors import http_error

_END = b"\r\n\r\n"  # of a header
_UPGRADE = re.compile(rb"^(?=upgrade[ \t]*:)", re.IGNORECASE | re.MULTILINE)
_PROGRESS = 16 << 10  # bytes that must leave within the time for reading, where more than 64 KiB wait


class Connections:
    """All of one listener. Where there are too many, that one ends which has waited longest. Belongs to the loop."""

    def __init__(self, limits: ConnectionLimits, *, max_unread_s: float) -> None:
        self.limits = limits
        self.max_unread_s = max_unread_s
        self.state = ServerState()  # the connections that are open, and the tasks of their requests
        self.all_gone = asyncio.Event()
        self.all_gone.set()
        self._is_closing = False
        self._waiting: dict[HttpConnection, None] = {}  # the longest first

    def add(self, connection: HttpConnection) -> None:
        self.all_gone.clear()
        self.waits(connection)
        if self._is_closing:  # it was on its way
            connection.transport.abort()
        elif len(self.state.connections) > self.limits.connections:
            longest = next(iter(self._waiting))
            self.serves(longest)
            longest.transport.abort()

    def waits(self, connection: HttpConnection) -> None:
        """For a request."""
        self._waiting[connection] = None

    def serves(self, connection: HttpConnection) -> None:
        """One, or is gone."""
        self._waiting.pop(connection, None)

    def remove(self, connection: HttpConnection) -> None:
        self.serves(connection)
        if not self.state.connections:
            self.all_gone.set()

    def finish(self) -> None:
        """End those that wait, and each of the others when it has answered."""
        self._is_closing = True
        for connection in list(self.state.connections):
            connection.shutdown()

    def abort(self) -> None:
        for connection in list(self.state.connections):
            connection.transport.abort()


class HttpConnection(HttpToolsProtocol):
    """The event loop makes one for each client that comes."""

    def __init__(self, connections: Connections, config: Config) -> None:
        super().__init__(config, connections.state, {})
        self._connections = connections
        self._limits = connections.limits
        self._ends_at = self.loop.time() + self._limits.age_s
        self._served: RequestResponseCycle | None = None  # uvicorn's `cycle` is the last one that has come
        self._num_fed = 0  # bytes, since there was a whole header or a part of a body
        self._num_header_bytes = 0
        self._header_tail: bytes | None = b""  # what has come last of a header; None: what comes is a body
        self._is_too_large = False
        self._header_due: asyncio.TimerHandle | None = None
        self._reading_due: asyncio.TimerHandle | None = None

    # ---- what the transport tells

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._await_header()
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._served:
            self._served.disconnected = True
            self._served.message_event.set()
        self._unset_keepalive_if_required()
        for due in (self._header_due, self._reading_due):
            if due:
                due.cancel()
        self._connections.remove(self)

    def data_received(self, data: bytes) -> None:
        if not self._is_busy:
            self._await_header()
            if self._header_tail is not None:
                data = _without_upgrade(data, behind=self._header_tail)
        self._num_fed += len(data)
        super().data_received(data)
        if self._header_tail is not None:
            self._header_tail = (self._header_tail + data)[1 - len(_END) :]
        if self._num_fed > self._limits.header_bytes and not self.transport.is_closing():  # of a trailer, too
            self._is_too_large = True
            self.send_400_response("")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_progress()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading_due:
            self._reading_due.cancel()
            self._reading_due = None
        if self.transport.is_closing():
            self._await_the_rest()

    # ---- what the parser tells; what is raised here ends the connection, by send_400_response

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():  # its body would be taken for the next request
            raise ValueError("another protocol is asked for")
        if self._is_busy and len(self.pipeline) >= self._limits.pipelined:
            raise ValueError("too many requests, one behind the other")
        self._num_fed = self._num_header_bytes = 0
        self._header_tail = None
        if self._header_due:
            self._header_due.cancel()
            self._header_due = None
        self._connections.serves(self)
        self.server_state.default_headers = _date(int(time.time()))
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()  # there are not many, and else a client that goes away would not be noticed
        else:
            self._served = self.cycle
        if self.loop.time() >= self._ends_at:
            self.cycle.keep_alive = False
        if self.parser.get_http_version() == "1.0":
            _send_without_chunks(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._num_fed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_fed = 0
        self._header_tail = b""
        super().on_message_complete()

    # ---- what becomes of a request

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._served, _ = self.pipeline[-1]
        super().on_response_complete()
        if not self._is_busy:
            self._connections.waits(self)
        if self.transport.is_closing():
            self._await_the_rest()

    def send_400_response(self, msg: str) -> None:
        """What is no request, or has too large a header, ends the connection: with a word, unless an answer is under
        way, which such a word would garble."""
        if not self._is_busy:
            self.transport.write(_rejection(431 if self._is_too_large else 400))
        self.transport.close()
        self._await_the_rest()

    def shutdown(self) -> None:
        """Ends it now, or after what is under way."""
        super().shutdown()
        if self.transport.is_closing():
            self._await_the_rest()

    def timeout_keep_alive_handler(self) -> None:
        self.shutdown()

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _count(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        limits = self._limits
        self._is_too_large = self._num_header_bytes > limits.header_bytes or len(self.headers) >= limits.headers
        if self._is_too_large:
            raise ValueError("the header is too large")

    # ---- what is waited for

    def _await_header(self) -> None:
        """Whatever comes meanwhile."""
        if self._header_due is None:
            self._header_due = self.loop.call_later(self._limits.open_s, self.shutdown)

    def _await_progress(self) -> None:
        """While more waits to be read than the transport takes."""
        left = self.transport.get_write_buffer_size()
        self._set_reading_due(self._check_progress, left)

    def _check_progress(self, before: int) -> None:
        if before - self.transport.get_write_buffer_size() < _PROGRESS:
            self.transport.abort()
        else:
            self._await_progress()

    def _await_the_rest(self) -> None:
        """After the end: what is left to be read is little, or its progress is looked at."""
        if not self.flow.write_paused:
            self._set_reading_due(self.transport.abort)

    def _set_reading_due(self, then: Callable[..., None], *args: int) -> None:
        if self._reading_due:
            self._reading_due.cancel()
        self._reading_due = self.loop.call_later(self._connections.max_unread_s, then, *args)


def _without_upgrade(data: bytes, *, behind: bytes) -> bytes:
    """No request is asked to go on in another protocol, which clients offer (Java's own, with every first one: h2c) and
    a server may pass over (RFC 9110, 7.8): the parser would not read its body.

    behind: the end of what has come of the header before. A body that grew here would end too soon, and the rest of it
    would be taken for a request.
    """
    end = (behind + data).find(_END)
    header = data if end < 0 else data[: max(0, end - len(behind))]
    return _UPGRADE.sub(b"x-", header) + data[len(header) :]


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """HTTP/1.0 does not know them: an answer of which no header tells the length ends with its connection."""
    send, cycle.chunked_encoding = cycle.send, False

    async def send_plainly(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))  # of this piece, however many come
        await send(message)

    cycle.send = send_plainly  # type: ignore[method-assign]


@lru_cache(maxsize=1)
def _date(second: int) -> list[tuple[bytes, bytes]]:
    return [(b"date", formatdate(second, usegmt=True).encode())]


@cache
def _rejection(status: int) -> bytes:
    said = {400: "this is no HTTP/1.1 request", 431: "the header of the request is too large"}[status]
    body = to_json(http_error(HTTPStatus(status).phrase, said))
    head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    return STATUS_LINE[status] + head + body
