"""Bursts of thousands of gRPC calls while the event loop is busy: every call is answered."""

from __future__ import annotations

import asyncio
import socket
import struct

from core.rpc import inference_pb2 as pb
from frontend.access.access import Access
from frontend.grpc.api import open_grpc_api
from tests.frontend.http.raw_http2 import frame, literal
from tests.support.fake_token_service import FakeTokenService
from tests.support.tiny_service import MakeCompletions

_NUM_CALLS = 3500  # gRPC's default drops some calls beyond 1,000 pending ones, and all beyond 3,000
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_CALL = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/cluster.v1.Inference/Tokenize",
    ":authority": "x",
    "te": "trailers",
    "content-type": "application/grpc",
}


def _burst() -> bytes:
    headers = b"".join(literal(*header) for header in _CALL.items())
    message = pb.TokenizeRequest(prompt="a").SerializeToString()
    data = struct.pack(">BI", 0, len(message)) + message
    said = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", frame(_SETTINGS, 0, 0)]
    said.append(frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 24)))
    for stream in range(1, 2 * _NUM_CALLS, 2):
        said += [frame(_HEADERS, _END_HEADERS, stream, headers), frame(_DATA, _END_STREAM, stream, data)]
    return b"".join([*said, frame(_PING, 0, 0, bytes(8))])


class _Ends:
    """Collects the streams that have ended."""

    def __init__(self) -> None:
        self.answered: set[int] = set()
        self.cut_off: set[int] = set()
        self.has_seen_all = False  # it answered a ping sent after all calls
        self.replies = b""
        self._buffer = b""

    def take(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= 9 and len(self._buffer) >= (end := 9 + int.from_bytes(self._buffer[:3], "big")):
            kind, flags, stream = self._buffer[3], self._buffer[4], int.from_bytes(self._buffer[5:9], "big")
            if kind == _DATA:
                self.answered.add(stream)
            elif stream not in self.answered and (kind == _RESET or (kind == _HEADERS and flags & _END_STREAM)):
                self.cut_off.add(stream)
            elif kind == _SETTINGS and not flags & _ACK:
                self.replies += frame(_SETTINGS, _ACK, 0)
            elif kind == _PING:
                self.has_seen_all |= bool(flags & _ACK)
                self.replies += b"" if flags & _ACK else frame(_PING, _ACK, 0, self._buffer[9:end])
            self._buffer = self._buffer[end:]


async def test_no_call_of_a_burst_is_dropped(completions: MakeCompletions) -> None:
    endpoint = await open_grpc_api(completions(FakeTokenService()), access=Access.anybody(), host="127.0.0.1", port=0)
    ends = _Ends()
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=30) as connection:
        connection.sendall(_burst())
        while not ends.has_seen_all:  # this thread runs the event loop, which is blocked meanwhile
            ends.take(connection.recv(1 << 16))
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(60):
            while len(ends.answered) + len(ends.cut_off) < _NUM_CALLS:
                replies, ends.replies = ends.replies, b""
                await loop.sock_sendall(connection, replies)
                ends.take(await loop.sock_recv(connection, 1 << 16))
    await endpoint.close(grace_s=0)
    assert not ends.cut_off, f"{len(ends.cut_off)} of {_NUM_CALLS} were"
