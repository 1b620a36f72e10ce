"""Raw HTTP/2 connection that starts gRPC messages and leaves them unfinished."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW_SIZE = 4  # of the settings
_MAX_FRAME = 16_384
_CONNECTION = 0


class RawHttp2:
    """HTTP/2 client (RFC 9113) that sends as far as the peer's windows allow, and counts what it sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.sent: Counter[int] = Counter()  # bytes of data, by stream
        self.ended: set[int] = set()  # by the peer
        self._reader, self._writer = reader, writer
        self._windows = {_CONNECTION: 65_535}
        self._initial = 65_535
        self._left: dict[int, memoryview] = {}

    @classmethod
    async def open(cls, host: str, port: int) -> RawHttp2:
        connection = cls(*await asyncio.open_connection(host, port))
        await connection.greet()
        return connection

    async def greet(self) -> None:
        self._writer.write(_PREFACE)
        self._frame(_SETTINGS, 0, _CONNECTION, b"")
        await self.pump()  # the peer's settings come first

    def begin(self, path: str, *, authorization: str, data: bytes) -> int:
        """Start a call whose message begins with these bytes; return its stream."""
        stream = 2 * len(self._windows) - 1
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "x",
            "te": "trailers",
            "content-type": "application/grpc",
            "authorization": authorization,
        }
        self._frame(_HEADERS, _END_HEADERS, stream, b"".join(literal(*header) for header in headers.items()))
        self._windows[stream], self._left[stream] = self._initial, memoryview(data)
        self._push()
        return stream

    async def pump(self) -> None:
        """Receive one frame, then send what the windows allow."""
        head = await self._reader.readexactly(9)
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:9], "big")
        payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
        if kind == _WINDOW_UPDATE:
            self._windows[stream] = self._windows.get(stream, 0) + int.from_bytes(payload, "big")
        elif kind == _SETTINGS and not flags & _ACK:
            for number, value in struct.iter_unpack(">HI", payload):
                if number == _INITIAL_WINDOW_SIZE:
                    for each in self._windows.keys() - {_CONNECTION}:
                        self._windows[each] += value - self._initial
                    self._initial = value
            self._frame(_SETTINGS, _ACK, _CONNECTION, b"")
        elif kind == _RESET or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            self.ended.add(stream)
        elif kind == _PING and not flags & _ACK:
            self._frame(_PING, _ACK, _CONNECTION, payload)
        self._push()
        await self._writer.drain()

    async def pump_forever(self) -> None:
        while True:
            await self.pump()

    def close(self) -> None:
        self._writer.close()

    def _push(self) -> None:
        for stream, left in self._left.items():
            while size := max(0, min(len(left), self._windows[stream], self._windows[_CONNECTION], _MAX_FRAME)):
                self._frame(_DATA, 0, stream, bytes(left[:size]))
                left = self._left[stream] = left[size:]
                self._windows[stream] -= size
                self._windows[_CONNECTION] -= size
                self.sent[stream] += size

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._writer.write(frame(kind, flags, stream, payload))


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """Encode a header as an HPACK literal."""
    assert len(name) < 127 and len(value) < 127
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
