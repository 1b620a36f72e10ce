"""Raw HTTP/2 connection that starts gRPC messages and leaves them unfinished."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
ACK, END_STREAM, END_HEADERS = 1, 1, 4
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
        self._writer.write(PREFACE)
        self._frame(SETTINGS, 0, _CONNECTION, b"")
        await self.pump()  # the peer's settings come first

    def begin(self, path: str, *, authorization: str, data: bytes) -> int:
        """Start a call whose message begins with these bytes; return its stream."""
        stream = 2 * len(self._windows) - 1
        self._frame(HEADERS, END_HEADERS, stream, header_block(path, authorization))
        self._windows[stream], self._left[stream] = self._initial, memoryview(data)
        self._push()
        return stream

    async def pump(self) -> None:
        """Receive one frame, then send what the windows allow."""
        head = await self._reader.readexactly(9)
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:9], "big")
        payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
        if kind == WINDOW_UPDATE:
            self._windows[stream] = self._windows.get(stream, 0) + int.from_bytes(payload, "big")
        elif kind == SETTINGS and not flags & ACK:
            for number, value in struct.iter_unpack(">HI", payload):
                if number == _INITIAL_WINDOW_SIZE:
                    for each in self._windows.keys() - {_CONNECTION}:
                        self._windows[each] += value - self._initial
                    self._initial = value
            self._frame(SETTINGS, ACK, _CONNECTION, b"")
        elif kind == RESET or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self.ended.add(stream)
        elif kind == PING and not flags & ACK:
            self._frame(PING, ACK, _CONNECTION, payload)
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
                self._frame(DATA, 0, stream, bytes(left[:size]))
                left = self._left[stream] = left[size:]
                self._windows[stream] -= size
                self._windows[_CONNECTION] -= size
                self.sent[stream] += size

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._writer.write(frame(kind, flags, stream, payload))


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def header_block(path: str, authorization: str = "") -> bytes:
    """Encode the headers of a gRPC call."""
    headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
    headers |= {"content-type": "application/grpc"} | ({"authorization": authorization} if authorization else {})
    return b"".join(_literal(*header) for header in headers.items())


def _literal(name: str, value: str) -> bytes:
    """Encode a header as an HPACK literal."""
    assert len(name) < 127 and len(value) < 127
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
