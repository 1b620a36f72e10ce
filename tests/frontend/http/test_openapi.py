"""OpenAPI document: valid, complete, and consistent with what the server accepts."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from fastapi import FastAPI
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from pydantic import ValidationError

from frontend.access.access import Access
from frontend.http.app import create_app
from frontend.http.openapi import ENDPOINTS, openapi_document
from frontend.openai.fields import OpenAIObject
from tests.frontend.access.keys import access_with, issue
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.plain_http import http_client
from tests.support.serving import USER, Served
from tests.support.tiny_service import MakeCompletions

_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_BODIES: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/completions", {"prompt": prompt}) for prompt in ("a", ["a", "b"], [5, 6], [[5], [6]])),
    *(("/v1/completions", {"prompt": "a", **more}) for more in (
        {"logit_bias": {"5": -1.5}, "stop": "x", "top_p": 1, "seed": 2**64 - 1, "typical_p": 1.0, "suffix": "",
         "guided_json": {}, "metadata": {"a": 1}, "mood": 1},
        {"max_tokens": 5.0, "seed": 1e3, "stop_token_ids": [5.0], "n": 1.0},  # as Gson writes integers
        {"stop": ["x"], "echo": True, "max_tokens": 0, "temperature": None, "response_format": {"type": "text"}},
    )),
    *(("/v1/chat/completions", {"messages": USER, **more}) for more in (
        {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": [_TOOL], "tool_choice": "required", "logprobs": True, "top_logprobs": 2, "reasoning_effort": "low"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "modalities": ["text"]},
        {"messages": [{"role": "assistant", "content": None, "refusal": None}], "stream_options": {}, "stream": True},
    )),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "text"}}, "tool_choice": "auto"}),
    ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}),
    ("/v1/responses", {"input": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "name": "f"}]}),
    ("/v1/messages", {"max_tokens": 5, "messages": USER, "system": "a", "thinking": {"type": "disabled"}}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
    ("/tokenize", {"prompt": "a"}),
    ("/tokenize", {"messages": USER}),
    ("/detokenize", {"tokens": [5]}),
]  # fmt: skip
_WRONG: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/completions", {"prompt": "a", **wrong}) for wrong in (
        {"prompt": None}, {"prompt": [{}]}, {"logit_bias": [5]}, {"stop": 5},
        {"guided_json": {"a": 1}}, {"typical_p": 0.5}, {"seed": "a"}, {"logprobs": True},
    )),
    *(("/v1/chat/completions", {"messages": USER, **wrong}) for wrong in (
        {"messages": "a"}, {"messages": [{"content": "a"}]}, {"tools": [{"function": {}}]}, {"tool_choice": "any"},
        {"logprobs": 5}, {"web_search_options": {}}, {"modalities": ["audio"]}, {"top_logprobs": 21},
    )),
    ("/v1/responses", {}),
    ("/v1/messages", {"messages": USER}),
    ("/detokenize", {"tokens": "a"}),
]  # fmt: skip


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return openapi_document()


def _app(completions: MakeCompletions, access: Access) -> FastAPI:
    probes = dict.fromkeys(("live", "ready", "startup"), bool)
    return create_app(completions(FakeTokenService()), access=access, is_healthy=lambda: True, probes=probes)


def test_document_is_valid_openapi(document: dict[str, Any]) -> None:
    OpenAPIV31SpecValidator(document).validate()
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_document_has_every_endpoint_and_no_other(completions: MakeCompletions) -> None:
    routes = _app(completions, Access.anybody()).routes
    there = {(method, route.path_format) for route in routes for method in route.methods}  # type: ignore[attr-defined]
    assert sorted((one.method, one.path) for one in ENDPOINTS) == sorted(there)


@pytest.mark.parametrize(("path", "body"), _BODIES, ids=str)
def test_accepted_bodies_validate(document: dict[str, Any], path: str, body: dict[str, Any]) -> None:
    _body_of(path).model_validate(body)
    assert not list(_validator(document, path).iter_errors(body))


@pytest.mark.parametrize(("path", "body"), _WRONG, ids=str)
def test_wrongly_typed_bodies_do_not_validate(document: dict[str, Any], path: str, body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        _body_of(path).model_validate(body)
    assert list(_validator(document, path).iter_errors(body))


@pytest.mark.asyncio(loop_scope="module")
async def test_document_and_page_are_served(endpoint: Served, document: dict[str, Any]) -> None:
    assert (await endpoint.http.get("/openapi.json")).json() == document
    answer = await endpoint.http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    page = _Page()
    page.feed(answer.text)
    assert not page.tags & {"script", "img", "link", "iframe"} and page.links - page.ids == {"openapi.json"}
    for one in ENDPOINTS:
        assert f"{one.method} {one.path}" in page.text
    assert re.search(r"temperature\s+number, 0 to 100\s+0 means greedy decoding\.", page.text)


async def test_document_needs_a_key_if_keys_are_required(completions: MakeCompletions) -> None:
    known = issue("acme")
    app = _app(completions, access_with(known))
    async with serve_http(app) as (host, port), http_client(base_url=f"http://{host}:{port}") as http:
        for one in ENDPOINTS:
            answer = await http.request(one.method, one.path.replace("{", "").replace("}", ""))
            assert (answer.status_code == 401) == one.needs_key, one.path
        for path in ("/openapi.json", "/docs"):
            assert (await http.get(path, headers={"authorization": known.header})).status_code == 200


class _Page(HTMLParser):
    """Return the text of an HTML page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.links, self.ids, self.text = set[str](), set[str](), set[str](), ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert name in ("href", "id", "lang", "charset"), name
            if name in ("href", "id"):
                (self.links if name == "href" else self.ids).add((value or "").removeprefix("#"))

    def handle_data(self, data: str) -> None:
        self.text += f"{data} " if data.strip() else data


def _body_of(path: str) -> type[OpenAIObject]:
    (kind,) = (one.body for one in ENDPOINTS if one.path == path and one.body)
    return kind


def _validator(document: dict[str, Any], path: str) -> Draft202012Validator:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return Draft202012Validator({**schema, "components": document["components"]})
