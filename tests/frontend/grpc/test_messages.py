"""Conversion of events to messages of cluster.v1.Inference."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from core.rpc import inference_pb2 as pb
from core.types.request import FinishReason, SampledToken, TokenLogprob
from frontend.grpc.messages import ResponseBytes, response_of
from frontend.text.answer_reader import CallText
from frontend.text.events import Delta, Event, Finished, Summary, TokenUsage
from frontend.text.tokenizer import Tokenizer
from router.generation import RequestRoute

_PLAIN = st.builds(
    lambda choice, text, token_id: Delta(choice, text, [SampledToken(token_id)], [0]),
    st.integers(0, 2),
    st.sampled_from(["", "a", "ä", 64 * "x", 65 * "x"]),
    st.integers(0, 2),
)
_MORE = (
    lambda delta: delta,
    lambda delta: replace(delta, thinking="so"),
    lambda delta: replace(delta, calls=[CallText(0, id="1", name="f")]),
    lambda delta: replace(delta, tokens=[SampledToken(1, TokenLogprob(logprob=-0.5, top=((1, -0.5),)))]),
    lambda delta: replace(delta, tokens=[*delta.tokens, SampledToken(7)], text_offsets=[0, 1]),
    lambda delta: Finished(delta.choice, FinishReason.STOP, "end"),
    lambda delta: Summary(usage=TokenUsage(prompt_tokens=3), route=RequestRoute(), ttft_s=0.5, itl_s=0.25),
)


@given(events=st.lists(st.builds(lambda delta, more: more(delta), _PLAIN, st.sampled_from(_MORE)), max_size=30))
def test_cached_messages_equal_fresh_ones(byte_level: Tokenizer, events: list[Event]) -> None:
    kept = ResponseBytes()
    for event in events:
        made = response_of(event, request_id="r", tokenizer=byte_level)
        assert pb.GenerateResponse.FromString(kept.of(event, request_id="r", tokenizer=byte_level)) == made
