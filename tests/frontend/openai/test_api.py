"""OpenAI API with the openai package against a real server, and raw HTTP where the package hides details."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from cluster.bench.endpoints import open_endpoint
from core.process.ports import free_port
from core.wire.client_access import EndpointAccess
from frontend.text.tokenizer import Tokenizer
from tests.support.serving import USER, Served, serving
from tests.support.tiny_service import MakeCompletions
from tests.support.waiting import becomes, stays

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_load_generator_uses_either_endpoint(endpoint: Served) -> None:
    open_one = str(endpoint.http.base_url).rstrip("/")
    for _ in range(6):
        async with open_endpoint(f"http://127.0.0.1:{free_port()},{open_one}", EndpointAccess()) as load:
            items = [item async for item in load.ask([100, 101], max_tokens=2, timeout_s=30)]
        assert sum(item for item in items if isinstance(item, int)) == 2


async def test_models(endpoint: Served) -> None:
    models = await endpoint.client.models.list()
    assert [model.id for model in models.data] == ["tiny"]
    one = await endpoint.client.models.retrieve("tiny")
    assert one.id == "tiny" and one.created == models.data[0].created > 1_700_000_000
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here; 'tiny' is"):
        await endpoint.client.models.retrieve("gpt-9")


async def test_chat(endpoint: Served, byte_level: Tokenizer) -> None:
    endpoint.say("Paris. 你好 🎉")
    answer = await endpoint.client.chat.completions.create(model="tiny", messages=USER)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Paris. 你好 🎉")
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    prompt = byte_level.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert endpoint.fake.started[0].token_ids[-len(prompt) :] == tuple(prompt)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens == len(endpoint.fake.started[0].token_ids)
    assert answer.usage.completion_tokens == len(byte_level.encode("Paris. 你好 🎉<|im_end|>"))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    drafted = answer.usage.completion_tokens_details
    assert drafted and (drafted.accepted_prediction_tokens, drafted.rejected_prediction_tokens) == (2, 7)


async def test_chat_streamed(endpoint: Served, byte_level: Tokenizer) -> None:
    endpoint.say("Paris. 你好 🎉")
    stream = await endpoint.client.chat.completions.create(
        model="tiny", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    first, *middle, last, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == "Paris. 你好 🎉"
    assert not any("�" in (chunk.choices[0].delta.content or "") for chunk in middle)
    assert [chunk.choices[0].finish_reason for chunk in middle] == [None] * len(middle)
    assert last.choices[0].finish_reason == "stop" and last.choices[0].delta.content is None
    assert usage.choices == [] and usage.usage is not None
    assert usage.usage.completion_tokens == len(byte_level.encode("Paris. 你好 🎉<|im_end|>"))
    assert {chunk.id for chunk in chunks} == {first.id} and {chunk.model for chunk in chunks} == {"tiny"}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


async def test_stream_bytes(endpoint: Served) -> None:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 2, "stream": True}
    answer = await endpoint.http.post("/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, end = answer.text.split("\n\n")
    assert end == "" and events[-1] == "data: [DONE]"
    parsed = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert [event["choices"][0]["text"] for event in parsed] == ["a", "b", ""]
    assert all("usage" not in event for event in parsed)
    assert parsed[-1]["choices"][0]["finish_reason"] == "length"


async def test_whole_and_streamed_answers_are_equal(endpoint: Served) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": "The capital 你好", "max_tokens": 20, "stop": ["c", "好T"]}
    whole = await endpoint.client.completions.create(**fields)
    chunks = [chunk async for chunk in await endpoint.client.completions.create(**fields, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text == "The "
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].model_extra == {"stop_reason": "c"}


async def test_zeros_that_the_api_allows(endpoint: Served) -> None:
    """`max_tokens: 0` computes the prompt alone, and `top_p: 0` keeps the most likely token."""
    empty = await endpoint.client.completions.create(model="tiny", prompt=["a", "bc"], max_tokens=0, logprobs=1)
    assert [(choice.text, choice.finish_reason) for choice in empty.choices] == [("", "length")] * 2
    assert empty.usage is not None and (empty.usage.prompt_tokens, empty.usage.completion_tokens) == (3, 0)
    await endpoint.client.chat.completions.create(model="tiny", messages=USER, max_tokens=1, top_p=0)
    assert 0 < endpoint.fake.started[-1].sampling.top_p < 1e-5


@pytest.mark.parametrize("as_ids", [False, True])
async def test_many_prompts_times_n(endpoint: Served, byte_level: Tokenizer, as_ids: bool) -> None:
    texts = ["ab", "xyz"]
    prompt: Any = [byte_level.encode(text) for text in texts] if as_ids else texts
    fields: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "n": 2}
    whole = await endpoint.client.completions.create(**fields)
    assert [choice.text for choice in whole.choices] == ["aba", "aba", "xyz", "xyz"]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 12)
    texts_of = [""] * 4
    async for chunk in await endpoint.client.completions.create(**fields, stream=True):
        texts_of[chunk.choices[0].index] += chunk.choices[0].text
    assert texts_of == ["aba", "aba", "xyz", "xyz"]
    assert len({sent.id for sent in endpoint.fake.started}) == 4


@pytest.mark.parametrize("n", [1, 3])
async def test_prompts_of_one_body_run_a_part_at_a_time(endpoint: Served, n: int) -> None:
    """The remaining prompts wait outside the router's queue, so an idle cluster rejects none of them."""
    most = 64 // n
    endpoint.fake.hang_after = 0
    prompt: Any = [[number] for number in range(200)]
    asking = asyncio.create_task(endpoint.client.completions.create(model="tiny", prompt=prompt, max_tokens=1, n=n))
    await becomes(lambda: len(endpoint.fake.started) == most)
    await stays(lambda: len(endpoint.fake.started) == most, for_s=0.05)
    endpoint.fake.go_on.set()
    answer = await asking
    assert len(answer.choices) == 200 * n and len(endpoint.fake.started) == 200


async def test_best_of_returns_the_most_likely_choices(endpoint: Served, byte_level: Tokenizer) -> None:
    """The best choice is also the longest, so it wins by the mean only. All choices that ran count as usage."""
    said = ["aa<|im_end|>", "bbb<|im_end|>", "c<|im_end|>", "ddddddddd<|im_end|>"]
    endpoint.fake.script = lambda request, choice: byte_level.encode(said[choice])
    endpoint.fake.logprobs = (-0.9, -0.25, -0.5, -0.125)
    fields: dict[str, Any] = {"model": "tiny", "prompt": ["x", "y"], "max_tokens": 20, "n": 2, "best_of": 4}
    answer = await endpoint.client.completions.create(**fields)
    assert [choice.text for choice in answer.choices] == ["ddddddddd", "bbb"] * 2
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None and choice.finish_reason == "stop" for choice in answer.choices)
    assert answer.usage and answer.usage.completion_tokens == 2 * sum(len(byte_level.encode(text)) for text in said)
    shown = await endpoint.client.completions.create(**fields, logprobs=0)
    assert shown.choices[1].logprobs and set(shown.choices[1].logprobs.token_logprobs or ()) == {-0.25}
    assert {sent.choices for sent in endpoint.fake.started} == {(0, 1, 2, 3)}
    same = await endpoint.client.completions.create(**fields | {"best_of": 2})
    assert [choice.text for choice in same.choices] == ["aa", "bbb"] * 2


async def test_chat_logprobs(endpoint: Served) -> None:
    endpoint.say("a𝄞")
    fields: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    whole = await endpoint.client.chat.completions.create(**fields)
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
    entries = whole.choices[0].logprobs.content
    assert [entry.token for entry in entries] == ["a", "\\xf0", "\\x9d", "\\x84", "\\x9e"]
    assert bytes(byte for entry in entries for byte in entry.bytes or []).decode() == "a𝄞"
    assert all(entry.logprob == -0.5 for entry in entries)
    assert [top.logprob for top in entries[0].top_logprobs] == [-0.5, -1.5]
    streamed = []
    async for chunk in await endpoint.client.chat.completions.create(**fields, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert [entry.model_dump() for entry in streamed] == [entry.model_dump() for entry in entries]
    without = await endpoint.client.chat.completions.create(model="tiny", messages=USER, max_tokens=1)
    assert without.choices[0].logprobs is None


async def test_text_logprobs(endpoint: Served) -> None:
    endpoint.say("ab𝄞c")
    answer = await endpoint.client.completions.create(model="tiny", prompt="x", max_tokens=7, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "\\xf0", "\\x9d", "\\x84", "\\x9e", "c"]
    assert logprobs.text_offset == [0, 1, 2, 2, 2, 2, 3]
    assert logprobs.token_logprobs == [-0.5] * 7
    assert logprobs.top_logprobs is not None and logprobs.top_logprobs[0] == {"a": -0.5}


async def test_extensions_reach_the_workers(endpoint: Served, byte_level: Tokenizer) -> None:
    extensions = {
        "top_k": 5, "min_p": 0.25, "repetition_penalty": 1.5, "stop_token_ids": [300], "ignore_eos": True,
        "min_tokens": 2, "seed": 7, "include_stop_str_in_output": True, "skip_special_tokens": False,
        "cache_salt": "acme", "priority": -3, "return_token_ids": True, "allowed_token_ids": [300, 5],
        "bad_words": ["Paris", " of course"],
    }  # fmt: skip
    answer = await endpoint.client.chat.completions.create(
        model="tiny", messages=USER, max_completion_tokens=4, max_tokens=99, temperature=0.5, top_p=0.5,
        presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={"11": -100, "2": 3}, extra_body=extensions,
    )  # fmt: skip
    (sent,) = endpoint.fake.started
    sampling = sent.sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.25, 1.5)
    assert (sampling.stop_token_ids, sampling.min_tokens, sampling.max_tokens) == ((300,), 2, 4)
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.5, 7)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.token_rules is not None
    assert sampling.token_rules.logit_bias == ((2, 3.0), (11, -100.0))
    assert sampling.token_rules.allowed_token_ids == (300, 5)
    written = ("Paris", " Paris", "of course", " of course")
    assert sampling.token_rules.bad_words == tuple(tuple(byte_level.encode(text)) for text in written)
    assert sent.salt and sent.salt != "acme" and sent.priority == -3
    assert answer.model_extra is not None and answer.model_extra["prompt_token_ids"] == list(sent.token_ids)
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["token_ids"] == list(sent.token_ids[:4])


async def test_token_ids_in_a_stream(endpoint: Served, byte_level: Tokenizer) -> None:
    body = {"prompt": "ab", "max_tokens": 3, "stream": True, "return_token_ids": True}
    answer = await endpoint.http.post("/v1/completions", json=body)
    choices = [json.loads(event[6:])["choices"][0] for event in answer.text.split("\n\n")[:-2]]
    assert [ids for choice in choices for ids in choice.get("prompt_token_ids", [])] == byte_level.encode("ab")
    assert [ids for choice in choices for ids in choice.get("token_ids", [])] == byte_level.encode("aba")


async def test_ignored_fields_are_accepted(endpoint: Served, byte_level: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = {
        "messages": [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "three", "refusal": None, "tool_calls": None, "annotations": []},
            {"role": "assistant", "content": None, "refusal": ""},
            {"role": "tool", "content": None, "tool_call_id": "a"},
            {"role": "user", "content": "four", "name": "ann"},
        ],
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "temperature": None,
        "stop": None,
        "max_tokens": 1,
        "chat_template_kwargs": {"enable_thinking": False},
        "top_logprobs": 0,
        "prediction": {"type": "content", "content": "x"},
        "reasoning_effort": "none",
        "prompt_cache_options": {"mode": "explicit"},
        "nobody_knows_it": None,
    }
    answer = await endpoint.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200 and "x-ignored-fields" not in answer.headers, answer.text
    prompt = byte_level.decode(endpoint.fake.started[0].token_ids, skip_special_tokens=False)
    assert (
        "user\none\ntwo<|im_end|>\n<|im_start|>assistant\nthree<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        in prompt
    )
    assert "<|im_start|>user\nResult of the call:\n<|im_end|>\n" in prompt


async def test_special_tokens_default_like_vllm(byte_fallback_dir: Path, byte_fallback: Tokenizer) -> None:
    (bos,) = byte_fallback.encode("")
    async with serving(MakeCompletions(byte_fallback_dir, byte_fallback)()) as endpoint:
        for asked, expected in ((None, True), (True, True), (False, False)):
            body = {"prompt": "hi", "max_tokens": 1, "add_special_tokens": asked}
            answer = await endpoint.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert (endpoint.fake.started[-1].token_ids[0] == bos) is expected


async def test_request_ids(endpoint: Served) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    answer = await endpoint.http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1" and answer.json()["id"] == "cmpl-mine-1"
    assert endpoint.fake.started[0].id.startswith("mine-1-")
    for headers in ({}, {"X-Request-Id": "a b"}, {"X-Request-Id": "x" * 200}):
        given = (await endpoint.http.post("/v1/completions", json={"prompt": ""}, headers=headers)).headers[
            "x-request-id"
        ]
        assert len(given) == 32


async def test_health_hides_replica_counts(endpoint: Served) -> None:
    answer = await endpoint.http.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    endpoint.is_healthy = False
    answer = await endpoint.http.get("/health")
    assert (answer.status_code, answer.json()) == (503, {"status": "unavailable"})


@pytest.mark.parametrize("path", ["/metrics", "/debug/routes/r1"])
async def test_admin_endpoints_are_not_public(endpoint: Served, path: str) -> None:
    assert (await endpoint.http.get(path)).status_code == 404


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_running_usage(endpoint: Served, path: str, together: int) -> None:
    """Each chunk has the usage of its choice so far; only with include_usage."""
    prompts: Any = {"messages": USER} if "chat" in path else {"prompt": ["hi", "hello"]}
    asked = {**prompts, "n": 2, "max_tokens": 6, "stream": True, "return_token_ids": True}
    endpoint.fake.together, endpoint.fake.script = together, lambda *_: [40]

    async def chunks(**options: bool) -> list[Any]:
        answer = await endpoint.http.post(path, json={**asked, "stream_options": options})
        assert "x-ignored-fields" not in answer.headers
        return [json.loads(event[6:]) for event in answer.text.split("\n\n")[:-2]]

    *parts, last = await chunks(include_usage=True, continuous_usage_stats=True)
    num_tokens: dict[int, int] = {}
    for part in parts:
        (choice,), usage = part["choices"], part["usage"]
        index = choice["index"]
        num_tokens[index] = num_tokens.get(index, 0) + len(choice.get("token_ids") or ())
        prompt_tokens = len(endpoint.fake.started[index // 2 if "prompt" in asked else 0].token_ids)
        assert usage == {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": num_tokens[index],
            "total_tokens": prompt_tokens + num_tokens[index],
        }
    assert set(num_tokens.values()) == {6}
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6 * len(num_tokens)
    asked["return_token_ids"] = False
    texts = [[str(chunk["choices"]) for chunk in await chunks(**options)] for options in (
        {"include_usage": True, "continuous_usage_stats": True}, {"include_usage": True}
    )]  # fmt: skip
    assert texts[0] == texts[1]
    assert not any("usage" in chunk for chunk in await chunks(continuous_usage_stats=True))
    assert {chunk["usage"] is None for chunk in (await chunks(include_usage=True))[:-1]} == {True}
