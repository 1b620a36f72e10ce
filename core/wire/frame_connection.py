"""One call over HTTP/2 on a connection of its own, read by the event loop itself: one message goes, many come.

As much of RFC 9113 as such a call needs of a client. The other side is gRPC's server in a worker of ours; what it says
that none says ends the connection. Nothing of it is kept beyond the bounds below.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from core.wire.plain_headers import HeadersUnread, plain_headers, read_headers

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD_BYTES, _PING_BYTES = 9, 8
_DATA, _HEADERS, _RESET, _SETTINGS, _PUSH, _PING, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 5, 6, 8, 9
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_CONNECTION, _CALL = 0, 1  # streams
_HEADER_TABLE_SIZE, _ENABLE_PUSH, _INITIAL_WINDOW_SIZE = 1, 2, 4
_FIRST_WINDOW_BYTES = 65_535  # of a connection
_MAX_FRAME_BYTES = 16_384

_WINDOW_BYTES = 1 << 20  # that may be on their way, or wait until they are taken
_MAX_HEADER_BYTES = 64 << 10
_MAX_UNSENT_BYTES = 64 << 10  # of answers to what it asks, while it does not read
_MESSAGE_HEAD_BYTES = 5
_HEADS = struct.Struct(">IBIBI")  # of a frame, and of the message that it begins with
_MAX_IDLE_FRAMES = 1000  # between two looks, that bring nothing of the call: a server of gRPC sends a few
_AT_ONCE = 64  # messages that are taken before others have their turn

Headers = Sequence[tuple[str, str]]


class FrameConnection(asyncio.Protocol):
    """Belongs to the event loop. Whoever holds it iterates over messages in one task at a time."""

    def __init__(
        self,
        method: str,
        request: bytes,
        *,
        scheme: str,
        authority: str,
        max_message_bytes: int,
        quiet_s: float,
        straight: Callable[[bytes], None] | None = None,
    ) -> None:
        """scheme: http, or https where the connection is one of TLS. quiet_s: after which the other side is asked
        whether it is there; it has twice as long to say anything. straight: has a message that comes by itself while
        whoever iterates waits for one, who is not woken for it."""
        self._opening = _opening(method, request, scheme, authority)
        self._max_message_bytes = max_message_bytes
        self._quiet_s = quiet_s
        self._straight = straight
        self._num_quiet = 0  # looks in a row before which nothing came
        self._num_idle_frames = 0  # since the last look
        self._num_at_once = 0  # messages taken that nobody had to wait for
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._read = bytearray()  # of the next frame
        self._block: bytearray | None = None  # of headers that go on
        self._is_last_block = False
        self._message = bytearray()  # the next one
        self._messages: deque[bytes] = deque()  # not taken
        self._num_unreturned = 0  # bytes of both windows
        self._waking: asyncio.Future[None] | None = None
        self.is_over = False
        self.lost = ""  # why, where it did not end as calls do
        self.trailers: Headers = ()

    async def message(self) -> bytes | None:
        """The next one; None: no more come."""
        self._num_at_once += 1
        if self._num_at_once > _AT_ONCE:
            self._num_at_once = 0
            await asyncio.sleep(0)
        while not self._messages and not self.is_over:
            self._num_at_once = 0
            self._waking = asyncio.get_running_loop().create_future()
            await self._waking
        if not self._messages:
            return None
        message = self._messages.popleft()
        self._return_windows()
        return message

    def end(self, why: str) -> None:
        """No more come; what has come may still be taken. The first word counts."""
        if self._timer:
            self._timer.cancel()
        self._timer = None
        if not self.is_over:
            self.is_over, self.lost = True, why
            self._wake()
        if self._transport:
            self._transport.abort()  # nothing that was to be said is of use any more

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self.is_over:
            return self._transport.abort()
        self._transport.write(self._opening)
        self._timer = asyncio.get_running_loop().call_later(self._quiet_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(f"the connection is lost: {exc}" if exc else "the connection was closed")

    def data_received(self, data: bytes) -> None:
        self._num_quiet = 0
        if self._straight and (message := self._only_message(data)) is not None:
            self._return_windows()
            return self._straight(message)
        read, at = self._read, 0
        read += data
        try:
            while len(read) - at >= _HEAD_BYTES and not self.is_over:
                if (size := int.from_bytes(read[at : at + 3], "big")) > _MAX_FRAME_BYTES:
                    raise _Nonsense(f"a frame of {size} bytes")
                if len(read) - at < _HEAD_BYTES + size:
                    break
                stream, payload = int.from_bytes(read[at + 5 : at + 9], "big"), read[at + 9 : at + 9 + size]
                self._take(read[at + 3], read[at + 4], stream, payload)
                at += _HEAD_BYTES + size
        except (_Nonsense, HeadersUnread) as error:
            return self.end(f"it says what no worker does: {error}")
        del read[:at]
        self._return_windows()
        if self._messages:
            self._wake()

    def _only_message(self, data: bytes) -> bytes | None:
        """Of a read that is one frame with one message, as most are: all of it is looked at once. None: it is another,
        or nobody waits."""
        is_awaited = self._waking and not self._waking.done() and not self.is_over
        if not is_awaited or self._read or self._message or self._block is not None or len(data) < _HEADS.size:
            return None
        size, message_size = len(data) - _HEAD_BYTES, len(data) - _HEADS.size
        if size > _MAX_FRAME_BYTES or message_size > self._max_message_bytes:
            return None
        if _HEADS.unpack_from(data) != (size << 8 | _DATA, 0, _CALL, 0, message_size):
            return None
        self._num_unreturned += size
        return data[_HEADS.size :]

    def _take(self, kind: int, flags: int, stream: int, payload: bytearray) -> None:
        if (self._block is not None) != (kind == _CONTINUATION):
            raise _Nonsense("headers that do not go on" if self._block is not None else "headers that go on from none")
        if kind != _DATA or not payload:
            self._num_idle_frames += 1
            if self._num_idle_frames > _MAX_IDLE_FRAMES:
                raise _Nonsense(f"{self._num_idle_frames} frames that bring nothing")
        if kind == _DATA:
            self._check_call(flags, stream)
            self._take_data(payload)
            if flags & _END_STREAM:
                raise _Nonsense("a call without a status")
        elif kind in (_HEADERS, _CONTINUATION):
            self._check_call(flags if kind == _HEADERS else 0, stream)
            if kind == _HEADERS:
                self._block, self._is_last_block = bytearray(), bool(flags & _END_STREAM)
            self._take_headers(payload, is_end=bool(flags & _END_HEADERS))
        elif kind == _RESET:
            self.end(f"the call was reset: {int.from_bytes(payload, 'big')}")
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            if kind == _PING and len(payload) != _PING_BYTES:
                raise _Nonsense("a ping of another length")
            self._say(kind, _ACK, payload if kind == _PING else b"")
        elif kind == _PUSH:
            raise _Nonsense("a push")

    def _take_data(self, payload: bytearray) -> None:
        self._num_unreturned += len(payload)
        if self._num_unreturned > _WINDOW_BYTES:
            raise _Nonsense("more than its window")
        message = self._message
        message += payload
        while len(message) >= _MESSAGE_HEAD_BYTES:
            is_compressed, size = struct.unpack_from(">BI", message)
            if is_compressed or size > self._max_message_bytes:
                raise _Nonsense(f"a message of {size} bytes{', compressed' if is_compressed else ''}")
            if len(message) < _MESSAGE_HEAD_BYTES + size:
                break
            self._messages.append(bytes(message[_MESSAGE_HEAD_BYTES : _MESSAGE_HEAD_BYTES + size]))
            del message[: _MESSAGE_HEAD_BYTES + size]

    def _take_headers(self, payload: bytearray, *, is_end: bool) -> None:
        assert self._block is not None
        self._block += payload
        if len(self._block) > _MAX_HEADER_BYTES:
            raise _Nonsense("too many headers")
        if not is_end:
            return
        block, self._block = bytes(self._block), None
        if self._is_last_block:
            self.trailers = read_headers(block)
            self.end("")

    def _check_call(self, flags: int, stream: int) -> None:
        if stream != _CALL or flags & (_PADDED | _PRIORITY):
            raise _Nonsense(f"a frame of stream {stream} with flags {flags}")

    def _return_windows(self) -> None:
        """As long as messages wait, what follows them has to wait, too: the other side then sends fewer and larger."""
        if not self._messages and self._num_unreturned > _WINDOW_BYTES // 2 and not self.is_over:
            returned, self._num_unreturned = struct.pack(">I", self._num_unreturned), 0
            self._say(_WINDOW_UPDATE, 0, returned)
            self._say(_WINDOW_UPDATE, 0, returned, stream=_CALL)

    def _look(self) -> None:
        """Looks are counted, not seconds: where this process stood still, what came meanwhile is read first."""
        self._num_idle_frames = 0
        self._num_quiet += 1
        if self._num_quiet > 3:
            return self.end(f"silent for {3 * self._quiet_s:g} s")
        if self._num_quiet > 1:
            self._say(_PING, 0, bytes(_PING_BYTES))
        self._timer = asyncio.get_running_loop().call_later(self._quiet_s, self._look)

    def _say(self, kind: int, flags: int, payload: bytes | bytearray, *, stream: int = _CONNECTION) -> None:
        assert self._transport
        if self._transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            return self.end("it asks, and does not read the answers")
        self._transport.write(_frame(kind, flags, stream, payload))

    def _wake(self) -> None:
        if self._waking and not self._waking.done():
            self._waking.set_result(None)


class _Nonsense(ValueError):
    """Not of HTTP/2, or not of a call of ours."""


def _opening(method: str, request: bytes, scheme: str, authority: str) -> bytes:
    """All that is said of a call, at once: nothing of it needs an answer first."""
    settings = struct.pack(">HIHIHI", _HEADER_TABLE_SIZE, 0, _ENABLE_PUSH, 0, _INITIAL_WINDOW_SIZE, _WINDOW_BYTES)
    headers = plain_headers(
        [
            (":method", "POST"),
            (":scheme", scheme),
            (":path", method),
            (":authority", authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        ]
    )
    message = struct.pack(">BI", 0, len(request)) + request
    return b"".join(
        [
            _PREFACE,
            _frame(_SETTINGS, 0, _CONNECTION, settings),
            _frame(_WINDOW_UPDATE, 0, _CONNECTION, struct.pack(">I", _WINDOW_BYTES - _FIRST_WINDOW_BYTES)),
            _frame(_HEADERS, _END_HEADERS, _CALL, headers),
            _frame(_DATA, _END_STREAM, _CALL, message),
        ]
    )


def _frame(kind: int, flags: int, stream: int, payload: bytes | bytearray) -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload
