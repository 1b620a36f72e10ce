"""Batched tokens are sent together, and messages are filled into templates: with the same content as without."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from core.rpc import inference_pb2 as pb
from core.types.request import FinishReason, SampledToken, TokenLogprob
from frontend.grpc.messages import response_bytes, response_of
from frontend.openai.answer import ChoiceChunks
from frontend.openai.forms import ChatForm, Form, TextForm
from frontend.text.answer_reader import CallText
from frontend.text.events import Delta, Event, Finished, Summary, TokenUsage
from frontend.text.tokenizer import Tokenizer
from router.generation import RequestRoute
from tests.support.fake_token_service import FakeTokenService
from tests.support.serving import Serve, Served

_ASKED = {"prompt": "abc", "max_tokens": 7, "logprobs": 1, "return_token_ids": True}


async def _chunks(served: Served, *, together: int, **more: Any) -> list[dict[str, Any]]:
    """Return the pieces of the one choice, without the final one."""
    served.fake.together = together
    body = _ASKED | {"stream": True, "stream_options": {"include_usage": True}} | more
    answer = await served.http.post("/v1/completions", json=body)
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    *chunks, end, usage = [json.loads(event.removeprefix("data: ")) for event in events]
    texts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0].get("token_ids")]
    assert usage["usage"]["completion_tokens"] == sum(len(text["token_ids"]) for text in texts)
    assert end["choices"][0]["finish_reason"]
    return texts


def _joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    logprobs = {key: [one for chunk in chunks for one in chunk["logprobs"][key]] for key in chunks[0]["logprobs"]}
    token_ids = [id for chunk in chunks for id in chunk["token_ids"]]
    return {"text": "".join(chunk["text"] for chunk in chunks), "token_ids": token_ids, "logprobs": logprobs}


@pytest.mark.parametrize("more", [{}, {"stop": "ca"}], ids=["to its length", "to a stop string"])
async def test_http_sends_batched_tokens_together(serve: Serve, more: dict[str, Any]) -> None:
    """A stop string in the middle of a batch discards the tokens after it."""
    served = await serve()
    alone = await _chunks(served, together=1, **more)
    together = await _chunks(served, together=3, **more)
    assert _joined(together) == _joined(alone)
    sizes = [len(chunk["token_ids"]) for chunk in together]
    assert sizes == ([3, 1] if more else [3, 3, 1]) and len(alone) == sum(sizes)


async def test_grpc_sends_batched_tokens_together(serve: Serve) -> None:
    served = await serve(token_service=FakeTokenService(together=3))
    events = await served.generate(
        pb.GenerateRequest(prompt="abc", sampling=pb.SamplingParams(max_tokens=7, logprobs=1))
    )
    deltas = [event.delta for event in events if event.HasField("delta")]
    assert [delta.text for delta in deltas] == ["abc", "abc", "a"]
    assert all(list(delta.token_ids) == [one.token_id for one in delta.logprobs] for delta in deltas)
    assert events[-1].summary.usage.completion_tokens == 7


def _said(chunk: bytes) -> dict[str, Any]:
    assert chunk.startswith(b"data: ") and chunk.endswith(b"\n\n")
    said: dict[str, Any] = json.loads(chunk.removeprefix(b"data: "))
    return said


@pytest.mark.parametrize("kind", [TextForm, ChatForm])
@pytest.mark.parametrize("has_ids", [False, True])
@pytest.mark.parametrize("is_usage_null", [False, True])
@given(text=st.text(min_size=1), request_id=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E)))
@example(text="\x00", request_id='"\\u0000"')
@example(text="\x01", request_id='"\x01"')
def test_templated_chunk_equals_a_fresh_one(
    byte_level: Tokenizer, kind: type[Form], has_ids: bool, is_usage_null: bool, text: str, request_id: str
) -> None:
    form = kind(byte_level)  # type: ignore[call-arg]  # both forms have a tokenizer
    head = {"id": request_id, "object": form.chunk, "created": 7, "model": "tiny"}
    prompt_ids = [1, 2] if has_ids else None
    chunks = ChoiceChunks(3, form, head=head, is_usage_null=is_usage_null, prompt_ids=prompt_ids)
    chunk = _said(chunks.chunk(Delta(0, text, [SampledToken(token_id=5), SampledToken(token_id=6)], [0, 1])))
    ids = {"token_ids": [5, 6]} if has_ids else {}
    choice = {"index": 3, **form.piece(text), "logprobs": None, "finish_reason": None, **ids}
    assert chunk == {**head, "choices": [choice], **({"usage": None} if is_usage_null else {})}
    if not has_ids:
        assert chunks.chunk(Delta(0, "", [SampledToken(token_id=5)], [0])) == b"", "nothing to say"


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
    for event in events:
        made = response_of(event, request_id="r", tokenizer=byte_level)
        assert pb.GenerateResponse.FromString(response_bytes(event, request_id="r", tokenizer=byte_level)) == made
