"""Prompt log-probabilities, echoed as in OpenAI's completions and listed as in vLLM."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from frontend.text.tokenizer import Tokenizer
from tests.support.serving import USER, Served

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_lm_eval_finds_the_fields_it_reads(endpoint: Served, byte_level: Tokenizer) -> None:
    """Request and response fields as used by LocalCompletionsAPI in lm_eval/models/openai_completions.py at
    https://github.com/EleutherAI/lm-evaluation-harness/tree/4e7e0d47f33bc71070c1d38394bafbb52b117163."""
    prompts = [byte_level.encode("The capital of France is Paris."), byte_level.encode("你好 世界")]
    body = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234,
            "echo": True}  # fmt: skip
    answer = (await endpoint.http.post("/v1/completions", json=body)).json()
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    assert len(choices) == 2
    for choice, ids in zip(choices, prompts, strict=True):
        logprobs, context = choice["logprobs"], 3
        assert logprobs["tokens"] == [byte_level.token_text(i) for i in [*ids, ids[0]]], "of the prompt, and the answer"
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        told = logprobs["token_logprobs"][context:-1]
        assert told == [-float(place) for place in range(context, len(ids))]
        for own, top in zip(told, logprobs["top_logprobs"][context:-1], strict=True):
            assert max(top.values()) == own + 0.5, "not the likeliest"
    assert [sent.num_prompt_logprobs for sent in endpoint.fake.started] == [1, 1]


async def test_echo_has_one_entry_per_token_whole_and_streamed(endpoint: Served, byte_level: Tokenizer) -> None:
    text = "<|im_start|>naïve 𝄞!"
    ids = byte_level.encode(text)
    fields: dict[str, Any] = {"model": "tiny", "prompt": text, "max_tokens": 2, "echo": True, "logprobs": 0, "n": 2}
    whole = await endpoint.client.completions.create(**fields)
    pieces: dict[int, list[Any]] = {0: [], 1: []}
    async for chunk in await endpoint.client.completions.create(**fields, stream=True):
        pieces[chunk.choices[0].index].append(chunk.choices[0])
    for choice in whole.choices:
        logprobs = choice.logprobs
        assert logprobs and logprobs.tokens and logprobs.text_offset and logprobs.token_logprobs
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(ids) + 2
        assert logprobs.token_logprobs[-2:] == [-0.5, -0.5]
        for token, start in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert "\\x" in token or choice.text[start:].startswith(token) or start == len(text), (token, start)
        streamed = pieces[choice.index]
        assert "".join(piece.text for piece in streamed) == choice.text
        assert streamed[0].text == text and streamed[0].logprobs.token_logprobs[0] is None
        told = [piece.logprobs for piece in streamed if piece.logprobs]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [one for each in told for one in getattr(each, name)] == getattr(logprobs, name), name


async def test_echo_shows_the_truncated_prompt(endpoint: Served, byte_level: Tokenizer) -> None:
    text = "The capital of France is Paris."
    ids = byte_level.encode(text)
    for kept in (3, len(ids)):
        shown = byte_level.decode(ids[-kept:], skip_special_tokens=False)
        body = {"prompt": text, "truncate_prompt_tokens": kept, "max_tokens": 2, "echo": True, "logprobs": 0}
        (choice,) = (await endpoint.http.post("/v1/completions", json=body)).json()["choices"]
        assert choice["text"].startswith(shown) and choice["logprobs"]["text_offset"][kept] == len(shown)
        for token, start in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True):
            assert choice["text"][start:].startswith(token), (token, start)
        (rendered,) = (await endpoint.http.post("/v1/completions/render", json=body)).json()
        assert (rendered["prompt"], rendered["token_ids"]) == (shown, ids[-kept:])
    assert shown == text


async def test_prompt_alone_can_be_returned(endpoint: Served, byte_level: Tokenizer) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 0, "echo": True}
    answer = await endpoint.client.completions.create(**fields, logprobs=2, extra_body={"return_token_ids": True})
    (choice,) = answer.choices
    ids = byte_level.encode("hello")
    assert (choice.text, choice.finish_reason, choice.model_extra["token_ids"]) == ("hello", "length", [])  # type: ignore[index]
    assert choice.logprobs and len(choice.logprobs.tokens or ()) == len(ids) > 1
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 0)
    assert (await endpoint.client.completions.create(**fields)).choices[0].logprobs is None


async def test_vllm_format_lists_ids_with_ranks(endpoint: Served, byte_level: Tokenizer) -> None:
    def check(listed: Any, ids: list[int], num_top: int) -> None:
        assert listed[0] is None and len(listed) == len(ids)
        for place, token_id in enumerate(ids[1:], 1):
            own = {"logprob": -place, "rank": 2, "decoded_token": byte_level.token_text(token_id)}
            assert listed[place][str(token_id)] == own
            assert next(iter(listed[place])) == str(token_id) and len(listed[place]) == max(1 + (num_top > 0), num_top)
            if num_top:
                assert listed[place][str(token_id + 1)]["rank"] == 1

    extra: dict[str, Any] = {"prompt_logprobs": 20, "return_token_ids": True}
    texts = await endpoint.client.completions.create(
        model="tiny", prompt=["ab " * 40, "cd"], max_tokens=1, extra_body=extra
    )
    for choice in texts.choices:
        more = choice.model_extra or {}
        check(more["prompt_logprobs"], more["prompt_token_ids"], 20)
        assert choice.logprobs is None
    both = await endpoint.client.completions.create(
        model="tiny", prompt="ab", max_tokens=1, logprobs=1, echo=True, extra_body={"prompt_logprobs": 0}
    )
    check((both.choices[0].model_extra or {})["prompt_logprobs"], byte_level.encode("ab"), 0)
    assert both.choices[0].logprobs and both.choices[0].logprobs.top_logprobs
    assert len(both.choices[0].logprobs.top_logprobs[1]) == 2
    chat = await endpoint.client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=1, n=2, extra_body=extra
    )  # type: ignore[call-overload]
    check(chat.model_extra["prompt_logprobs"], chat.model_extra["prompt_token_ids"], 20)
    without = await endpoint.client.completions.create(model="tiny", prompt="ab", max_tokens=1)
    assert "prompt_logprobs" not in (without.choices[0].model_extra or {})
    assert endpoint.fake.started[-1].num_prompt_logprobs is None


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "with stream"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "from 0 to 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
        ({"logprobs": 21, "echo": True}, "logprobs", "from 0 to 20"),
        ({"logprobs": 1, "echo": True, "max_tokens": 0, "stream": True}, "max_tokens", "with stream"),
        ({"logprobs": 20, "echo": True, "n": 120, "prompt": [[5] * 200]}, "logprobs", "at most 262144"),
        ({"prompt_logprobs": 20, "n": 2, "prompt": [[5] * 200] * 50}, "prompt_logprobs", "at most 262144"),
    ],
)
async def test_invalid_combinations_are_rejected_by_name(
    endpoint: Served, fields: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as rejected:
        await endpoint.client.completions.create(model="tiny", prompt="ab", extra_body={"max_tokens": 1, **fields})
    assert rejected.value.param == param
    assert not endpoint.fake.started
