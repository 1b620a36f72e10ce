"""The OpenAI door as its own client sees it: a real server, the openai package, and raw HTTP where that hides much."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from fake_dispatcher import FakeDispatcher
from http_server import serve_http
from tiny_service import MakeCompletions

from cluster.errors import CapacityError, LayoutMismatch, ReplicaLost
from cluster.request import SequenceRequest, choice_seed
from router.completion import Completions
from router.openai_api import create_app
from router.tokenizer import Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Door:
    service: Completions
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI
    is_healthy: bool = True

    @property
    def fake(self) -> FakeDispatcher:
        assert isinstance(self.service.dispatcher, FakeDispatcher)
        return self.service.dispatcher


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(completions: MakeCompletions) -> AsyncIterator[Door]:
    service = completions(FakeDispatcher())
    app = create_app(service, health=lambda: door.is_healthy, metrics=service.metrics.render)
    async with serve_http(app) as (host, port), httpx.AsyncClient(base_url=f"http://{host}:{port}") as http:
        async with openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0) as client:
            door = Door(service, http, client)
            yield door


@pytest.fixture
def door(server: Door) -> Door:
    """The one server of this module, with a dispatcher of the test's own."""
    server.service.dispatcher = FakeDispatcher()
    server.is_healthy = True
    return server


USER = [{"role": "user", "content": "hi"}]


def say(tokenizer: Tokenizer, text: str) -> Any:
    ids = tokenizer.encode(text)
    return lambda *_: ids


# ---- answers


async def test_models(door: Door) -> None:
    models = await door.client.models.list()
    assert [model.id for model in models.data] == ["tiny"]
    assert (await door.client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here; 'tiny' is"):
        await door.client.models.retrieve("gpt-9")


async def test_chat(door: Door, byte_level: Tokenizer) -> None:
    door.fake.script = say(byte_level, "Paris. 你好 🎉<|im_end|>")
    answer = await door.client.chat.completions.create(model="tiny", messages=USER)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Paris. 你好 🎉")
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    prompt = byte_level.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert door.fake.started[0].token_ids[-len(prompt) :] == tuple(prompt)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens == len(door.fake.started[0].token_ids)
    assert answer.usage.completion_tokens == len(byte_level.encode("Paris. 你好 🎉<|im_end|>"))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_chat_streamed(door: Door, byte_level: Tokenizer) -> None:
    door.fake.script = say(byte_level, "Paris. 你好 🎉<|im_end|>")
    stream = await door.client.chat.completions.create(
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


async def test_the_stream_on_the_wire(door: Door) -> None:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 2, "stream": True}
    answer = await door.http.post("/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, end = answer.text.split("\n\n")
    assert end == "" and events[-1] == "data: [DONE]"
    parsed = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert [event["choices"][0]["text"] for event in parsed] == ["a", "b", ""]
    assert all("usage" not in event for event in parsed)
    assert parsed[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_whole_and_a_streamed_answer_are_the_same(door: Door) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": "The capital 你好", "max_tokens": 20, "stop": ["c", "好T"]}
    whole = await door.client.completions.create(**fields)
    chunks = [chunk async for chunk in await door.client.completions.create(**fields, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text == "The "
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].model_extra == {"stop_reason": "c"}


@pytest.mark.parametrize("as_ids", [False, True])
async def test_many_prompts_times_n(door: Door, byte_level: Tokenizer, as_ids: bool) -> None:
    texts = ["ab", "xyz"]
    prompt: Any = [byte_level.encode(text) for text in texts] if as_ids else texts
    fields: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "n": 2}
    whole = await door.client.completions.create(**fields)
    assert [choice.text for choice in whole.choices] == ["aba", "aba", "xyz", "xyz"]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 12)
    texts_of = [""] * 4
    async for chunk in await door.client.completions.create(**fields, stream=True):
        texts_of[chunk.choices[0].index] += chunk.choices[0].text
    assert texts_of == ["aba", "aba", "xyz", "xyz"]
    assert len({sent.id for sent in door.fake.started}) == 4


async def test_one_prompt_as_token_ids(door: Door, byte_level: Tokenizer) -> None:
    answer = await door.client.completions.create(model="tiny", prompt=byte_level.encode("ab"), max_tokens=4)
    assert answer.choices[0].text == "abab"


async def test_echo(door: Door, byte_level: Tokenizer) -> None:
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "echo": True}
    ids = byte_level.encode("<|im_start|>ab")
    for prompt in ("<|im_start|>ab", ids):
        whole = await door.client.completions.create(prompt=prompt, **fields)
        assert whole.choices[0].text == "<|im_start|>aba"  # the special token of the answer is not shown
        stream = await door.client.completions.create(prompt=prompt, stream=True, **fields)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "<|im_start|>aba"


async def test_seeds(door: Door, byte_level: Tokenizer) -> None:
    def draw(request: SequenceRequest, choice: int) -> Sequence[int]:
        return random.Random(choice_seed(request.sampling.seed, choice)).choices(range(100, 300), k=8)

    door.fake.script = draw

    async def texts(seed: int | None, n: int = 1) -> list[str | None]:
        answer = await door.client.chat.completions.create(model="tiny", messages=USER, seed=seed, n=n, max_tokens=8)
        return [choice.message.content for choice in answer.choices]

    assert await texts(7) == await texts(7) != await texts(8)
    assert await texts(None) != await texts(None)
    first, second = await texts(7, n=2)
    assert [first] == await texts(7) and first != second


async def test_logprobs_of_a_chat(door: Door, byte_level: Tokenizer) -> None:
    door.fake.script = say(byte_level, "a𝄞")
    fields: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    whole = await door.client.chat.completions.create(**fields)
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
    entries = whole.choices[0].logprobs.content
    assert [entry.token for entry in entries] == ["a", "\\xf0", "\\x9d", "\\x84", "\\x9e"]
    assert bytes(byte for entry in entries for byte in entry.bytes or []).decode() == "a𝄞"
    assert all(entry.logprob == -0.5 for entry in entries)
    assert [top.logprob for top in entries[0].top_logprobs] == [-0.5, -1.5]
    streamed = []
    async for chunk in await door.client.chat.completions.create(**fields, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert [entry.model_dump() for entry in streamed] == [entry.model_dump() for entry in entries]
    without = await door.client.chat.completions.create(model="tiny", messages=USER, max_tokens=1)
    assert without.choices[0].logprobs is None


async def test_logprobs_of_a_text(door: Door, byte_level: Tokenizer) -> None:
    door.fake.script = say(byte_level, "ab𝄞c")
    answer = await door.client.completions.create(model="tiny", prompt="x", max_tokens=7, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "\\xf0", "\\x9d", "\\x84", "\\x9e", "c"]
    assert logprobs.text_offset == [0, 1, 2, 2, 2, 2, 3]
    assert logprobs.token_logprobs == [-0.5] * 7
    assert logprobs.top_logprobs is not None and logprobs.top_logprobs[0] == {"a": -0.5}


async def test_extensions_reach_the_workers(door: Door) -> None:
    extensions = {
        "top_k": 5,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "stop_token_ids": [300],
        "ignore_eos": True,
        "min_tokens": 2,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "cache_salt": "acme",
        "priority": -3,
        "return_token_ids": True,
    }
    answer = await door.client.chat.completions.create(
        model="tiny",
        messages=USER,
        max_completion_tokens=4,
        max_tokens=99,
        temperature=0.5,
        top_p=0.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        extra_body=extensions,
    )
    (sent,) = door.fake.started
    sampling = sent.sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.25, 1.5)
    assert (sampling.stop_token_ids, sampling.min_tokens, sampling.max_tokens) == ((300,), 2, 4)
    assert (sampling.temperature, sampling.top_p) == (0.5, 0.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sent.salt, sent.priority) == ("acme", -3)
    assert answer.model_extra is not None and answer.model_extra["prompt_token_ids"] == list(sent.token_ids)
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["token_ids"] == list(sent.token_ids[:4])


async def test_token_ids_in_a_stream(door: Door, byte_level: Tokenizer) -> None:
    body = {"prompt": "ab", "max_tokens": 3, "stream": True, "return_token_ids": True}
    answer = await door.http.post("/v1/completions", json=body)
    choices = [json.loads(event[6:])["choices"][0] for event in answer.text.split("\n\n")[:-2]]
    assert [ids for choice in choices for ids in choice.get("prompt_token_ids", [])] == byte_level.encode("ab")
    assert [ids for choice in choices for ids in choice.get("token_ids", [])] == byte_level.encode("aba")


async def test_what_is_taken_and_ignored(door: Door, byte_level: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = {
        "messages": [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "three", "refusal": None, "tool_calls": None, "annotations": []},
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
    }
    answer = await door.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    prompt = byte_level.decode(door.fake.started[0].token_ids, skip_special_tokens=False)
    assert "user\none\ntwo<|im_end|>\n<|im_start|>assistant\nthree<|im_end|>\n" in prompt


async def test_request_ids(door: Door) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    answer = await door.http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1" and answer.json()["id"] == "cmpl-mine-1"
    assert door.fake.started[0].id.startswith("mine-1-")
    for headers in ({}, {"X-Request-Id": "a b"}, {"X-Request-Id": "x" * 200}):
        given = (await door.http.post("/v1/completions", json={"prompt": ""}, headers=headers)).headers["x-request-id"]
        assert len(given) == 32


async def test_health_and_metrics(door: Door) -> None:
    assert (await door.http.get("/health")).status_code == 200
    door.is_healthy = False
    assert (await door.http.get("/health")).status_code == 503

    async def num_generated() -> float:
        answer = await door.http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        (line,) = [line for line in answer.text.splitlines() if line.startswith("generated_tokens_total ")]
        return float(line.split()[1])

    before = await num_generated()
    await door.client.completions.create(model="tiny", prompt="a", max_tokens=3)
    assert await num_generated() == before + 3


# ---- errors


async def refused(door: Door, body: Any, *, path: str = "/v1/completions", status: int = 400) -> dict[str, Any]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await door.http.post(path, content=raw)
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert not door.fake.started
    return error


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "temperature", "from 0 to"),
    ({"temperature": "hot"}, "temperature", "should be a valid number"),
    ({"temperatur": 1}, "temperatur", "unknown field"),
    ({"max_tokens": 1.5}, "max_tokens", "should be a valid integer"),
    ({"max_tokens": 0}, "max_tokens", "from 1"),
    ({"prompt": 5}, "prompt", "must be a string, a list"),
    ({"prompt": []}, "prompt", "not empty"),
    ({"prompt": [[1, "a"]]}, "prompt", "must be a string, a list"),
    ({"prompt": [True]}, "prompt", "must be a string, a list"),
    ({"prompt": ""}, "prompt", "must not be empty"),
    ({"prompt": [1_000_000]}, "prompt", "is no token id"),
    ({"prompt": ["a"] * 1025}, "prompt", "at most 1024"),
    ({"stop": [1]}, "stop[0]", "should be a valid string"),
    ({"stop": {}}, "stop", "must be a string or a list"),
    ({"stop": ""}, "stop", "1 to 1024 characters"),
    ({"stream_options": {"usage": True}}, "stream_options.usage", "unknown field"),
    ({"logit_bias": {"1": 5}}, "logit_bias", "is not supported here"),
    ({"suffix": "x"}, "suffix", "is not supported here"),
    ({"best_of": 2}, "best_of", "must equal n"),
    ({"echo": True, "logprobs": 1}, "echo", "not supported"),
]


@pytest.mark.parametrize(("fields", "param", "says"), WRONG, ids=lambda value: str(value)[:40])
async def test_a_wrong_text_request(door: Door, fields: dict[str, Any], param: str, says: str) -> None:
    error = await refused(door, {"prompt": "a", **fields})
    assert error["param"] == param and says in error["message"] and param.split("[")[0] in error["message"]
    assert error["type"] == "invalid_request_error" and error["code"] == "invalid_value"


WRONG_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least one"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content", "must be a string or a list"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "must be a string or a list"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "should be 'text'",
    ),
    ({"messages": [{"role": "user", "content": "a", "mood": 1}]}, "messages[0].mood", "unknown field"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, "messages[0].tool_calls", "not supported"),
    ({"tools": [{"type": "function"}]}, "tools", "is not supported here"),
    ({"response_format": {"type": "json_object"}}, "response_format", "is not supported here"),
    ({"modalities": ["audio"]}, "modalities", "is not supported here"),
    ({"top_logprobs": 2}, "top_logprobs", "set logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"logprobs": 1}, "logprobs", "should be a valid boolean"),
]


@pytest.mark.parametrize(("fields", "param", "says"), WRONG_CHAT, ids=lambda value: str(value)[:40])
async def test_a_wrong_chat(door: Door, fields: dict[str, Any], param: str, says: str) -> None:
    error = await refused(door, {"messages": USER, **fields}, path="/v1/chat/completions")
    assert error["param"] == param and says in error["message"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[]", "should be an object"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": ' + b"[" * 100_000, "not valid JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "finite"),
        (b"{}", "prompt"),
    ],
    ids=["cut", "empty", "list", "utf8", "surrogate", "nested", "nan", "missing"],
)
async def test_a_body_that_is_no_request(door: Door, body: bytes, says: str) -> None:
    assert says in (await refused(door, body))["message"]


async def test_unknown_model(door: Door) -> None:
    error = await refused(door, {"model": "gpt-9", "prompt": "a"}, status=404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_too_long_a_prompt(door: Door) -> None:
    for prompt in ([1] * 300, "word " * 1_000_000):
        assert (await refused(door, {"prompt": prompt}))["code"] == "context_length_exceeded"
    messages = [{"role": "user", "content": "word " * 1000}]
    error = await refused(door, {"messages": messages, "stream": True}, path="/v1/chat/completions")
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_the_clients_exceptions(door: Door) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature: must be from 0") as caught:
        await door.client.chat.completions.create(model="tiny", messages=USER, temperature=-1)
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.BadRequestError, match="nonsense: unknown field"):
        await door.client.chat.completions.create(model="tiny", messages=USER, extra_body={"nonsense": 1})
    with pytest.raises(openai.NotFoundError):
        await door.client.chat.completions.create(model="gpt-9", messages=USER, stream=True)


async def test_unknown_routes(door: Door) -> None:
    missing = await door.http.get("/v2/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "not_found"
    wrong = await door.http.get("/v1/completions")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
    assert "GET /v1/completions" in wrong.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_full(door: Door, stream: bool) -> None:
    door.fake.refuse = CapacityError("every decode replica is full", retry_after_s=2.2)
    body = {"prompt": "a", "stream": stream}
    answer = await door.http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert answer.json()["error"]["code"] == "overloaded"
    with pytest.raises(openai.RateLimitError):
        await door.client.completions.create(model="tiny", prompt="a", stream=stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ReplicaLost("decode-0 died"), 503, "replica_lost"),
        (LayoutMismatch("block sizes differ"), 500, "layout_mismatch"),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ],
    ids=["lost", "mismatch", "bug"],
)
async def test_failing_before_the_first_token(
    door: Door, error: Exception, status: int, code: str, stream: bool
) -> None:
    door.fake.fail_after = (0, error)
    answer = await door.http.post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert answer.status_code == status and answer.json()["error"]["code"] == code
    assert "secret" not in answer.text


async def test_failing_in_the_stream(door: Door) -> None:
    door.fake.fail_after = (2, ReplicaLost("decode-0 died"))
    answer = await door.http.post("/v1/completions", json={"prompt": "abc", "stream": True})
    assert answer.status_code == 200
    *texts, error, end = answer.text.split("\n\n")
    assert [json.loads(text[6:])["choices"][0]["text"] for text in texts] == ["a", "b"]
    assert json.loads(error[6:])["error"]["code"] == "replica_lost" and end == ""  # and no [DONE]
    stream = await door.client.completions.create(model="tiny", prompt="abc", stream=True)
    with pytest.raises(openai.APIError, match="decode-0 died"):
        async for _ in stream:
            pass


async def test_one_of_many_prompts_fails(door: Door) -> None:
    door.fake.fail_after = (2, ReplicaLost("decode-0 died"))
    answer = await door.http.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
    assert answer.status_code == 503
    assert len(door.fake.ended) == len(door.fake.started)
