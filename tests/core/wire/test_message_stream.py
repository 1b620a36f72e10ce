"""Token streams: messages arrive complete and in order; a router's tokens are packed into frames."""

from __future__ import annotations

import asyncio
import struct
from contextlib import aclosing

import pytest

from core.rpc import worker_pb2 as pb
from core.types.errors import ReplicaLost
from core.types.request import DraftTally, FinishReason, SampledToken, TokenLogprob
from core.wire.frames import FrameHub
from core.wire.message_stream import BadMessage, MessageStream
from core.wire.thread_events import CallEvents

_MAX_BYTES = 1000


class FakeTransport(asyncio.Transport):
    """Transport that records what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def abort(self) -> None:
        pass


def _coded(*messages: bytes) -> bytes:
    return b"".join(struct.pack(">I", len(message)) + message for message in messages)


def _connected(taken: list[bytes]) -> MessageStream:
    stream = MessageStream(taken.append, max_message_bytes=_MAX_BYTES)
    stream.connection_made(FakeTransport())
    return stream


@pytest.mark.parametrize("part", [1, 3, 4, 5, 7, 100, 10_000])
async def test_messages_arrive_complete_and_keep_alives_are_dropped(part: int) -> None:
    taken: list[bytes] = []
    stream, messages = _connected(taken), [b"one", b"", b"x" * _MAX_BYTES, b"2", b"", b"three"]
    data = _coded(*messages)
    for start in range(0, len(data), part):
        stream.data_received(data[start : start + part])
    assert taken == [message for message in messages if message]
    assert not stream.ended.done()


async def test_message_in_a_single_read() -> None:
    taken: list[bytes] = []
    stream = _connected(taken)
    for message in (b"one", b"", b"two"):
        stream.data_received(_coded(message))
    stream.data_received(_coded(b"three", b"four")[:-1])
    stream.data_received(b"r")
    assert taken == [b"one", b"two", b"three", b"four"]


@pytest.mark.parametrize("before", [b"", _coded(b"one"), _coded(b"one")[:-1]])
async def test_oversized_message_ends_the_connection_unbuffered(before: bytes) -> None:
    taken: list[bytes] = []
    stream = _connected(taken)
    stream.data_received(before)
    stream.data_received(_coded(b"one")[len(before) :] + struct.pack(">I", _MAX_BYTES + 1) + b"more")
    assert isinstance(stream.ended.result(), BadMessage) and "exceeds the limit of 1000" in str(stream.ended.result())
    stream.data_received(_coded(b"two"))
    assert taken == [b"one"]


async def test_exception_of_take_ends_the_connection() -> None:
    taken: list[bytes] = []

    def take(message: bytes) -> None:
        taken.append(message)
        raise ZeroDivisionError

    stream = MessageStream(take, max_message_bytes=_MAX_BYTES)
    stream.connection_made(FakeTransport())
    stream.data_received(_coded(b"one", b"two"))
    assert isinstance(stream.ended.result(), ZeroDivisionError) and taken == [b"one"]


@pytest.mark.parametrize(("rest", "is_clean"), [(b"", True), (b"\x00", False), (_coded(b"one")[:-1], False)])
async def test_an_end_within_a_message_is_an_error(rest: bytes, is_clean: bool) -> None:
    stream = _connected([])
    stream.data_received(_coded(b"one") + rest)
    stream.connection_lost(None)
    assert (stream.ended.result() is None) == is_clean
    stream.send(b"too late")


async def test_drained_waits_for_the_peer_or_the_end() -> None:
    stream, transport = MessageStream(lambda message: None, max_message_bytes=_MAX_BYTES), FakeTransport()
    stream.connection_made(transport)
    stream.send(b"one")
    await stream.drained(10)
    for go_on in (stream.resume_writing, stream.abort):
        stream.pause_writing()
        waiting = asyncio.ensure_future(stream.drained(10))
        await asyncio.sleep(0)
        assert not waiting.done()
        go_on()
        await waiting
    assert transport.written == _coded(b"one")


async def test_drained_times_out() -> None:
    stream = _connected([])
    stream.pause_writing()
    with pytest.raises(TimeoutError):
        await stream.drained(0.01)


_LAST = SampledToken(8, finish_reason=FinishReason.LENGTH)


async def _frame(hub: FrameHub, *tokens: tuple[int, SampledToken]) -> pb.Frame:
    """Return the frame with these tokens, published in one step each."""
    async with aclosing(hub.frames("router-0")) as frames:
        await anext(frames)
        for token in tokens:  # one step each
            hub.publish({"router-0": [token]})
        return await anext(frames)


async def test_plain_tokens_are_packed() -> None:
    frame = await _frame(FrameHub(), *((stream, SampledToken(10 * stream)) for stream in (3, 1, 2)))
    assert list(frame.plain_streams) == [3, 1, 2] and list(frame.plain_token_ids) == [30, 10, 20]
    assert not frame.streams


async def test_order_within_a_stream_is_kept() -> None:
    tokens = [
        (1, SampledToken(5)),
        (2, SampledToken(6)),
        (1, SampledToken(7)),
        (2, _LAST),
        (1, SampledToken(9)),
        (1, _LAST),
    ]
    frame = await _frame(FrameHub(), *tokens)
    assert list(zip(frame.plain_streams, frame.plain_token_ids, strict=True)) == [(1, 5), (2, 6), (1, 7)]
    rich = [(one.stream, token.token_id, token.finish_reason) for one in frame.streams for token in one.tokens]
    assert rich == [(2, 8, "length"), (1, 9, ""), (1, 8, "length")]


async def test_token_with_details_is_not_plain() -> None:
    for token in (
        _LAST,
        SampledToken(1, logprob=TokenLogprob(logprob=-1.0)),
        SampledToken(1, drafts=DraftTally(steps=1)),
    ):
        frame = await _frame(FrameHub(), (1, token))
        assert len(frame.streams) == 1 and not frame.plain_streams


async def test_events_come_in_order_and_end() -> None:
    events: CallEvents[int] = CallEvents()

    def tell() -> None:
        for i in range(3):
            events.put(i)
        events.end()

    await asyncio.to_thread(tell)
    assert [event async for event in events] == [0, 1, 2]


async def test_an_end_with_an_error_is_raised_after_what_came_before() -> None:
    events: CallEvents[str] = CallEvents()
    events.put("first")
    events.end(ReplicaLost("gone"))
    seen = []
    with pytest.raises(ReplicaLost, match="gone"):
        async for event in events:
            seen.append(event)
    assert seen == ["first"]
