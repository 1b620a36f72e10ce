"""GET /openapi.json and /docs: what the HTTP door takes, for programs and for people, from the types of its bodies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from fastapi import FastAPI
from starlette.responses import Response

from frontend.anthropic.types import CountTokensBody, MessagesBody
from frontend.http.docs_page import PAGE_HEADERS, page_of
from frontend.http.json_response import JSON, to_json
from frontend.http.openapi_schemas import PLACE, schemas_of
from frontend.openai.fields import OpenAIObject
from frontend.openai.tokens_api import PACKAGE, DetokenizeBody, TokenizeBody
from frontend.openai.types import ChatBody, TextBody
from frontend.responses.types import ResponsesBody
from frontend.text.models import Models


@dataclass(frozen=True)
class Described:
    """An endpoint of the HTTP door."""

    method: str
    path: str
    summary: str
    body: type[OpenAIObject] | None = None
    streams: bool = False  # where the body says so
    query: Sequence[str] = ()
    needs_key: bool = True  # where the operator asks for keys


ENDPOINTS = (
    Described("GET", "/v1/models", "The one model that is served."),
    Described("GET", "/v1/models/{model_id}", "The same, by its id."),
    Described("POST", "/v1/completions", "Text in, text out.", TextBody, streams=True),
    Described("POST", "/v1/completions/render", "The tokens that each prompt would be, without an answer.", TextBody),
    Described("POST", "/v1/chat/completions", "Messages in, a message out.", ChatBody, streams=True),
    Described("POST", "/v1/chat/completions/render", "The tokens of its prompt, without an answer.", ChatBody),
    Described("POST", "/v1/responses", "Items in, items out; OpenAI's Responses API.", ResponsesBody, streams=True),
    Described("GET", "/v1/responses/{id}", "A stored response."),
    Described("DELETE", "/v1/responses/{id}", "Forgets a stored response."),
    Described("GET", "/v1/responses/{id}/input_items", "What it was asked.", query=("limit", "order", "after")),
    Described("POST", "/v1/messages", "Anthropic's Messages API.", MessagesBody, streams=True),
    Described("POST", "/v1/messages/count_tokens", "How many tokens its prompt would be.", CountTokensBody),
    Described("POST", "/tokenize", "A prompt, or messages, to tokens.", TokenizeBody),
    Described("POST", "/detokenize", "Tokens to text.", DetokenizeBody),
    Described("GET", "/tokenizer_info", "The special tokens and the chat template."),
    Described("GET", "/version", "Of this software."),
    Described("GET", "/openapi.json", "This document."),
    Described("GET", "/docs", "This document as a page."),
    Described("GET", "/health", "200 while requests can be served, else 503.", needs_key=False),
    Described("GET", "/health/live", "Whether this router lives.", needs_key=False),
    Described("GET", "/health/ready", "Whether it takes requests.", needs_key=False),
    Described("GET", "/health/startup", "Whether it has started.", needs_key=False),
)


def openapi_document() -> JSON:
    """In OpenAPI 3.1. Takes some 0.2 s."""
    paths: dict[str, JSON] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    bodies = dict.fromkeys(endpoint.body for endpoint in ENDPOINTS if endpoint.body)
    return {
        "openapi": "3.1.0",
        "info": {"title": PACKAGE, "version": version(PACKAGE), "description": "docs/CLIENTS.md says more."},
        "paths": paths,
        "security": [{"bearer": []}, {"api_key": []}],
        "components": {
            "schemas": schemas_of([body for body in bodies if body]),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "Where the operator asks for API keys."},
                "api_key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _operation(endpoint: Described) -> JSON:
    path, method = endpoint.path, endpoint.method.lower()
    content: JSON = {"text/html" if path == "/docs" else "application/json": {}}
    if endpoint.streams:
        content["text/event-stream"] = {}
    operation: JSON = {
        "operationId": "_".join([method, *path.replace("{", "").replace("}", "").replace(".", "_").split("/")[1:]]),
        "summary": endpoint.summary,
        "responses": {"200": {"description": "The answer.", "content": content},
                      "default": {"description": "An error, in the form of this API."}},
    }  # fmt: skip
    named = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in named]
    parameters += [{"name": name, "in": "query", "schema": {"type": "string"}} for name in endpoint.query]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body:
        schema = {"$ref": PLACE + endpoint.body.__name__}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if not endpoint.needs_key:
        operation["security"] = []
    return operation


class OpenapiApi:
    """The two endpoints. What they answer is made when somebody first asks."""

    def __init__(self, models: Models) -> None:
        self._threads = models.default.threads
        self._made: tuple[bytes, bytes] | None = None  # the document and the page

    def add_to(self, app: FastAPI) -> None:
        app.add_api_route("/openapi.json", self.document, methods=["GET"])
        app.add_api_route("/docs", self.page, methods=["GET"])

    async def document(self) -> Response:
        document, _ = await self._answers()
        return Response(document, media_type="application/json")

    async def page(self) -> Response:
        _, page = await self._answers()
        return Response(page, media_type="text/html", headers=PAGE_HEADERS)

    async def _answers(self) -> tuple[bytes, bytes]:
        if self._made is None:
            self._made = await self._threads.run("", _both)
        return self._made


def _both() -> tuple[bytes, bytes]:
    document = openapi_document()
    return to_json(document), page_of(document).encode()
