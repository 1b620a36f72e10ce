"""Frames of a router: its tokens in order, in as few messages as it can read."""

from __future__ import annotations

from contextlib import aclosing

from core.rpc import worker_pb2 as pb
from core.types.request import DraftTally, FinishReason, SampledToken, TokenLogprob
from core.wire.frames import FrameHub

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
