"""Cheap clients for thousands of concurrent streams: they record arrival times and barely parse.

Each requests `num_tokens` tokens, greedily.
"""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import Sequence
from functools import partial

from core.rpc import inference_pb2 as pb

_PATH = "/cluster.v1.Inference/Generate"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW_SIZE, _WIDE = 4, (1 << 31) - 1


class TimedStream:
    """Arrival times of the parts of one answer."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.gaps_s: list[float] = []
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._last = 0.0

    def record_event(self) -> None:
        now = time.perf_counter()
        if self._last:
            self.gaps_s.append(now - self._last)
        elif not self.begun.done():
            self.begun.set_result(None)
        self._last = now

    def end(self, error: str = "") -> None:
        error = error or ("" if self._last else "the stream ended before its first event")
        for future in (self.begun, self.ended):
            if not future.done():
                future.set_exception(ConnectionError(error)) if error else future.set_result(None)


async def open_http(port: int, prompts: Sequence[Sequence[int]], *, num_tokens: int) -> list[TimedStream]:
    """Open one connection per prompt."""
    loop, streams = asyncio.get_running_loop(), []
    for prompt in prompts:
        stream = TimedStream()
        await loop.create_connection(partial(_Http, stream, prompt, num_tokens), "127.0.0.1", port)
        streams.append(stream)
    return streams


async def open_grpc(
    port: int, prompts: Sequence[Sequence[int]], *, num_tokens: int, per_connection: int = 100
) -> list[TimedStream]:
    loop, streams = asyncio.get_running_loop(), [TimedStream() for _ in prompts]
    for first in range(0, len(prompts), per_connection):
        some = slice(first, first + per_connection)
        calls = list(zip(streams[some], prompts[some], strict=True))
        await loop.create_connection(partial(_Http2, calls, num_tokens), "127.0.0.1", port)
    return streams


class _Http(asyncio.Protocol):
    def __init__(self, stream: TimedStream, prompt: Sequence[int], num_tokens: int) -> None:
        self._stream = stream
        fields = {"prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        self._body = json.dumps(fields | {"stream": True}).encode()
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        transport.write(head % len(self._body) + self._body)

    def data_received(self, data: bytes) -> None:
        if b'"text":' in data:
            self._stream.record_event()
        self._tail = (self._tail + data)[-64:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._stream.end("" if b"[DONE]" in self._tail else f"an answer ended with {self._tail!r}")


class _Http2(asyncio.Protocol):
    """HTTP/2 client with the subset of RFC 9113 that a gRPC server needs."""

    def __init__(self, calls: Sequence[tuple[TimedStream, Sequence[int]]], num_tokens: int) -> None:
        self._streams = {2 * i + 1: stream for i, (stream, _) in enumerate(calls)}
        self._messages = [_message(prompt, num_tokens) for _, prompt in calls]
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        wide = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _WIDE)
        frames = [_PREFACE, _frame(_SETTINGS, 0, 0, wide), _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 30))]
        for number, message in zip(self._streams, self._messages, strict=True):
            frames += [_frame(_HEADERS, _END_HEADERS, number, _CALL), _frame(_DATA, _END_STREAM, number, message)]
        transport.write(b"".join(frames))

    def data_received(self, data: bytes) -> None:
        buffer, at = self._buffer, 0
        buffer += data
        while len(buffer) - at >= 9:
            size = int.from_bytes(buffer[at : at + 3], "big")
            if len(buffer) - at < 9 + size:
                break
            kind, flags, number = buffer[at + 3], buffer[at + 4], int.from_bytes(buffer[at + 5 : at + 9], "big")
            self._take(kind, flags, number, bytes(buffer[at + 9 : at + 9 + size]) if kind == _PING else b"")
            at += 9 + size
        del buffer[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        for stream in self._streams.values():
            stream.end("connection lost")

    def _take(self, kind: int, flags: int, number: int, ping: bytes) -> None:
        if kind == _DATA:
            self._streams[number].record_event()
        elif kind == _HEADERS and flags & _END_STREAM:
            self._streams.pop(number).end()
        elif kind == _RESET and number in self._streams:
            self._streams.pop(number).end("the call was reset")
        elif kind == _SETTINGS and not flags & _ACK:
            self._transport.write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._transport.write(_frame(_PING, _ACK, 0, ping))
        if not self._streams:
            self._transport.close()


def _message(prompt: Sequence[int], num_tokens: int) -> bytes:
    sampling = pb.SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling).SerializeToString()
    return struct.pack(">BI", 0, len(message)) + message


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, number) + payload


def _literal(name: str, value: str) -> bytes:
    """Encode a header as a literal in HPACK, without Huffman coding."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


_CALL = b"".join(
    _literal(name, value)
    for name, value in (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", _PATH),
        (":authority", "x"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    )
)
