"""Chunks filled into a template equal chunks encoded as a whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from core.types.request import SampledToken
from frontend.openai.answer import ChoiceChunks
from frontend.openai.forms import ChatForm, Form, TextForm
from frontend.text.events import Delta
from frontend.text.tokenizer import Tokenizer


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
