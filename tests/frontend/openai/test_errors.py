"""Errors of the OpenAI API: OpenAI's format, naming the field."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from core.types.errors import CapacityError, LayoutMismatch, ReplicaLost
from tests.support.serving import USER, Served

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def rejected(endpoint: Served, body: Any, *, path: str = "/v1/completions", status: int = 400) -> dict[str, Any]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await endpoint.http.post(path, content=raw)
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert not endpoint.fake.started
    return error


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "temperature", "from 0 to"),
    ({"temperature": "hot"}, "temperature", "should be a valid number"),
    ({"max_tokens": 1.5}, "max_tokens", "should be a valid integer"),
    ({"prompt": 5}, "prompt", "must be a non-empty string"),
    ({"prompt": []}, "prompt", "non-empty"),
    ({"prompt": [[1, "a"]]}, "prompt", "must be a non-empty string"),
    ({"prompt": [True]}, "prompt", "must be a non-empty string"),
    ({"prompt": ["a"] * 1025}, "prompt", "at most 1024"),
    ({"prompt": ["a"] * 140, "max_tokens": 240}, "max_tokens", "times n and prompts"),
    ({"stop": [1]}, "stop[0]", "should be a valid string"),
    ({"stop": {}}, "stop", "must be a string or a list"),
    *(({"logit_bias": bias}, "logit_bias", "keys are token ids") for bias in ({"a": 1}, {"-1": 1}, {"01": 1}, [1])),
    *(({"logit_bias": {"1": x}}, "logit_bias", "-100 to 100") for x in (100.5, -101, 10**400, "x", True, None)),
    ({"logit_bias": {"1000000": 1}}, "logit_bias", "1000000"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "must not be empty"),
    ({"allowed_token_ids": [5, 1_000_000]}, "allowed_token_ids", "1000000"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", "-1"),
    ({"allowed_token_ids": ["5"]}, "allowed_token_ids[0]", "should be a valid integer"),
    ({"allowed_token_ids": [5] * 1025}, "allowed_token_ids", "at most 1024"),
    *(({"bad_words": [word]}, "bad_words", "1 to 128 characters") for word in ("", "  ", "a" * 129)),
    ({"bad_words": ["a"] * 129}, "bad_words", "at most 128"),
    ({"bad_words": [rare * 128 for rare in "龍龎龏龐"]}, "bad_words", "at most 1024"),
    ({"bad_words": "a"}, "bad_words", "should be a valid array"),
    ({"best_of": 1, "n": 2}, "best_of", "must be at least n"),
    ({"best_of": 2, "stream": True}, "best_of", "with stream"),
    ({"best_of": 129}, "best_of", "from 1 to 128"),
    ({"best_of": 100, "prompt": ["a"] * 11}, "prompt", "at most 1024"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or at least 1"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "requires stream"),
]
UNSUPPORTED = [
    ({"tools": [{}]}, "tools", "not supported by this endpoint"),
    ({"suffix": "x"}, "suffix", "is not supported"),
    ({"guided_json": {"type": "object"}}, "guided_json", "use structured_outputs.json"),
    ({"ebnf": "root ::= 'a'"}, "ebnf", "use structured_outputs.grammar"),
]


@pytest.mark.parametrize(("fields", "param", "says"), WRONG, ids=lambda value: str(value)[:40])
async def test_invalid_text_request(endpoint: Served, fields: dict[str, Any], param: str, says: str) -> None:
    error = await rejected(endpoint, {"prompt": "a", **fields})
    assert error["param"] == param and says in error["message"] and param.split("[")[0] in error["message"]
    assert error["type"] == "invalid_request_error" and error["code"] == "invalid_value"


@pytest.mark.parametrize(("fields", "param", "says"), UNSUPPORTED, ids=lambda value: str(value)[:40])
async def test_unsupported_fields_have_their_own_code(
    endpoint: Served, fields: dict[str, Any], param: str, says: str
) -> None:
    error = await rejected(endpoint, {"prompt": "a", **fields})
    assert error["param"] == param and says in error["message"] and error["code"] == "unsupported_parameter"


F = {"type": "function", "function": {"name": "f"}}
WRONG_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content", "must be a string or a list"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "a string or a list"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "required"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type",
     "'image_url' is not supported; supported: text"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, "messages[0].tool_calls[0]", "an object"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "should match pattern"),
    ({"tools": [F, F]}, "tools", "'f' appears twice"),
    ({"tool_choice": "required"}, "tool_choice", "requires tools"),
    ({"tools": [F], "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tool_choice",
     "with structured_outputs"),
    ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice",
     "tool 'g' not found"),
    ({"tools": [F], "tool_choice": {"type": "any"}}, "tool_choice", "must be"),
    ({"functions": [{"name": "f"}]}, "functions", "is not supported; use tools"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "cannot be combined"),
    ({"response_format": {"type": "json_object"}}, "response_format", "is not supported"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "requires type json_object"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern",
     "is not supported"),
    ({"modalities": ["audio"]}, "modalities", "is not supported"),
    ({"moderation": {"model": "m"}}, "moderation", "is not supported"),
    ({"web_search_options": {}}, "web_search_options", "is not supported"),
    ({"max_tokens": 1, "max_completion_tokens": 0}, "max_completion_tokens", "from 1"),
    ({"max_completion_tokens": 2, "min_tokens": 3}, "min_tokens", "max_completion_tokens, 2"),
    ({"max_completion_tokens": 10**6}, "messages", "and 1000000 for the answer"),
    ({"top_logprobs": 2}, "top_logprobs", "requires logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"logprobs": 1}, "logprobs", "should be a valid boolean"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "says"), WRONG_CHAT, ids=lambda value: str(value)[:40])
async def test_invalid_chat(endpoint: Served, fields: dict[str, Any], param: str, says: str) -> None:
    error = await rejected(endpoint, {"messages": USER, **fields}, path="/v1/chat/completions")
    assert error["param"] == param and says in error["message"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[]", "should be an object"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"prompt": "a", "stop": "\\ud800"}', "not valid JSON"),
        (
            b'{"prompt": "a\\ud83c", "response_format": {"type": "json_schema", "json_schema": '
            b'{"name": "a", "schema": {"const": "\\ud800"}}}}',
            "not valid JSON",
        ),
        (b'{"prompt": ' + b"[" * 100_000, "not valid JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "finite"),
        (b"{}", "prompt"),
    ],
    ids=["cut", "empty", "list", "utf8", "surrogate", "surrogate in a schema", "nested", "nan", "missing"],
)
async def test_body_that_is_not_a_request(endpoint: Served, body: bytes, says: str) -> None:
    assert says in (await rejected(endpoint, body))["message"]


async def test_too_long_prompt(endpoint: Served) -> None:
    for prompt in ([1] * 300, "word " * 1_000_000):
        assert (await rejected(endpoint, {"prompt": prompt}))["code"] == "context_length_exceeded"
    messages = [{"role": "user", "content": "word " * 1000}]
    error = await rejected(endpoint, {"messages": messages, "stream": True}, path="/v1/chat/completions")
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_unknown_routes(endpoint: Served) -> None:
    missing = await endpoint.http.get("/v2/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "not_found"
    wrong = await endpoint.http.get("/v1/completions")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "OPTIONS, POST"
    assert "GET /v1/completions" in wrong.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "says"),
    [("/chat/completions", "ends with /v1"), ("/v1/v1/messages", "without it"), ("/v1/embeddings", ": Not Found")],
)
async def test_wrong_base_url_gets_a_hint(endpoint: Served, path: str, says: str) -> None:
    answer = await endpoint.http.post(path, json={})
    assert answer.status_code == 404 and answer.json()["error"]["message"].endswith(says)


@pytest.mark.parametrize("stream", [False, True])
async def test_full_cluster(endpoint: Served, stream: bool) -> None:
    endpoint.fake.reject = CapacityError("every decode replica is full", retry_after_s=2.2)
    body = {"prompt": "a", "stream": stream}
    answer = await endpoint.http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert answer.json()["error"]["code"] == "overloaded"
    with pytest.raises(openai.RateLimitError):
        await endpoint.client.completions.create(model="tiny", prompt="a", stream=stream)


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
async def test_failure_before_the_first_token(
    endpoint: Served, error: Exception, status: int, code: str, stream: bool
) -> None:
    endpoint.fake.fail_after = (0, error)
    answer = await endpoint.http.post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert answer.status_code == status and answer.json()["error"]["code"] == code
    assert "secret" not in answer.text


async def test_failure_in_the_stream(endpoint: Served) -> None:
    endpoint.fake.fail_after = (2, ReplicaLost("decode-0 died"))
    answer = await endpoint.http.post("/v1/completions", json={"prompt": "abc", "stream": True})
    assert answer.status_code == 200
    *texts, error, end = answer.text.split("\n\n")
    assert [json.loads(text[6:])["choices"][0]["text"] for text in texts] == ["a", "b"]
    assert json.loads(error[6:])["error"]["code"] == "replica_lost" and end == ""  # and no [DONE]
    stream = await endpoint.client.completions.create(model="tiny", prompt="abc", stream=True)
    with pytest.raises(openai.APIError, match="decode-0 died"):
        async for _ in stream:
            pass


async def test_failure_of_one_prompt_fails_the_request(endpoint: Served) -> None:
    endpoint.fake.fail_after = (2, ReplicaLost("decode-0 died"))
    answer = await endpoint.http.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
    assert answer.status_code == 503
    assert len(endpoint.fake.ended) == len(endpoint.fake.started)
