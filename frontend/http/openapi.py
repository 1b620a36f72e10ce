"""GET /openapi.json and GET /docs: the HTTP API, described from the types of its bodies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import version
from json import dumps
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core import core_schema
from starlette.responses import Response

from frontend.anthropic.types import CountTokensBody, MessagesBody
from frontend.http.event_stream import JSON, to_json
from frontend.openai.api import PACKAGE
from frontend.openai.fields import Only, OpenAIObject
from frontend.openai.types import ChatBody, DetokenizeBody, TextBody, TokenizeBody
from frontend.responses.types import ResponsesBody
from frontend.text.completion import Models
from frontend.text.completion_request import RANGES


@dataclass(frozen=True)
class Described:
    """Endpoint in the OpenAPI document."""

    method: str
    path: str
    summary: str
    body: type[OpenAIObject] | None = None
    streams: bool = False  # if the body asks for it
    query: Sequence[str] = ()
    needs_key: bool = True  # if the deployment requires API keys


ENDPOINTS = (
    Described("GET", "/v1/models", "List the served models."),
    Described("GET", "/v1/models/{model_id}", "Describe one served model."),
    Described("POST", "/v1/completions", "Complete a text.", TextBody, streams=True),
    Described("POST", "/v1/completions/render", "Tokenize each prompt without generating.", TextBody),
    Described("POST", "/v1/chat/completions", "Answer a chat.", ChatBody, streams=True),
    Described("POST", "/v1/chat/completions/render", "Tokenize the prompt of a chat without generating.", ChatBody),
    Described("POST", "/v1/responses", "Create a response; OpenAI's Responses API.", ResponsesBody, streams=True),
    Described("GET", "/v1/responses/{id}", "Get a stored response."),
    Described("DELETE", "/v1/responses/{id}", "Delete a stored response."),
    Described(
        "GET", "/v1/responses/{id}/input_items", "List a response's input items.", query=("limit", "order", "after")
    ),
    Described("POST", "/v1/messages", "Answer a chat; Anthropic's Messages API.", MessagesBody, streams=True),
    Described("POST", "/v1/messages/count_tokens", "Count the tokens of the prompt.", CountTokensBody),
    Described("POST", "/tokenize", "Tokenize a prompt or messages.", TokenizeBody),
    Described("POST", "/detokenize", "Convert tokens to text.", DetokenizeBody),
    Described("GET", "/tokenizer_info", "Get the special tokens and the chat template."),
    Described("GET", "/version", "Get the version of this software."),
    Described("GET", "/openapi.json", "Get this document."),
    Described("GET", "/docs", "Get this document as an HTML page."),
    Described("GET", "/health", "Health check: 200 if requests can be served, otherwise 503.", needs_key=False),
    Described("GET", "/health/live", "Liveness probe.", needs_key=False),
    Described("GET", "/health/ready", "Readiness probe.", needs_key=False),
    Described("GET", "/health/startup", "Startup probe.", needs_key=False),
)


def openapi_document() -> JSON:
    """Return the OpenAPI 3.1 document. Takes some 0.2 s."""
    paths: dict[str, JSON] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    bodies = dict.fromkeys(endpoint.body for endpoint in ENDPOINTS if endpoint.body)
    return {
        "openapi": "3.1.0",
        "info": {"title": PACKAGE, "version": version(PACKAGE), "description": "See docs/CLIENTS.md for details."},
        "paths": paths,
        "security": [{"bearer": []}, {"api_key": []}],
        "components": {
            "schemas": schemas_of([body for body in bodies if body]),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "If the deployment requires API keys."},
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
        "responses": {"200": {"description": "Success.", "content": content},
                      "default": {"description": "Error, in the format of this API."}},
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
    """Endpoints of the document and its page, both created on first use."""

    def __init__(self, models: Models) -> None:
        self._threads = models.default.threads
        self._made: tuple[bytes, bytes] | None = None  # document and page

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


PAGE_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } td, th { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; }
tr { border-top: 1px solid #8884; } code { font-size: 90%; }
"""


def page_of(document: JSON) -> str:
    """Return the page: a table of all endpoints, then a table for each schema."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"]
    parts += [f'<h1>{title}</h1><p>As a document: <a href="openapi.json">openapi.json</a></p>', *_endpoints(document)]
    for name, schema in document["components"]["schemas"].items():
        parts.append(f'<h2 id="{escape(name)}">{escape(name)}</h2><table>')
        required = schema.get("required", ())
        parts += [
            _row(field, field_schema, field in required) for field, field_schema in schema.get("properties", {}).items()
        ]
        parts.append("</table>")
    return "\n".join([*parts, "</html>\n"])


def _endpoints(document: JSON) -> Iterator[str]:
    yield "<table><tr><th>endpoint<th>body<th></tr>"
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            body = operation.get("requestBody")
            kind = _type(body["content"]["application/json"]["schema"]) if body else ""
            yield (
                f"<tr><td><code>{method.upper()} {escape(path)}</code><td>{kind}<td>{escape(operation['summary'])}</tr>"
            )
    yield "</table>"


def _row(name: str, field_schema: JSON, is_required: bool) -> str:
    text = ("Required. " if is_required else "") + field_schema.get("description", "")
    return f"<tr><td><code>{escape(name)}</code><td>{_type(field_schema)}<td>{escape(text)}</tr>"


def _type(schema: JSON) -> str:
    """Return a short description of a schema's type. Null is omitted: every optional field accepts it."""
    match schema:
        case {"$ref": str(place)}:
            name = escape(place.removeprefix(PLACE))
            return f'<a href="#{name}">{name}</a>'
        case {"anyOf": list(either)}:
            kinds = dict.fromkeys(_type(one) for one in either if one.get("type") != "null")
            return " or ".join(kind for kind in kinds if kind)
        case {"enum": list(values)}:
            return ", ".join(f"<code>{escape(dumps(value))}</code>" for value in values if value is not None)
        case {"const": value}:
            return f"<code>{escape(dumps(value))}</code>"
        case {"type": "array"}:
            inside = _type(schema.get("items", {}))
            return f"list of {inside}" if inside else "list"
        case {"type": "integer" | "number" as kind}:
            low = schema.get("minimum", schema.get("exclusiveMinimum"))
            return kind if low is None else f"{kind}, {low} to {schema['maximum']}"
    return escape(schema.get("type", ""))


PLACE = "#/components/schemas/"
_DEPENDS = "max_tokens"  # its limits depend on the context and on `echo`


def schemas_of(kinds: Sequence[type[BaseModel]]) -> dict[str, JSON]:
    """Return the schemas of the bodies and of all objects inside them, by name. Takes some 0.2 s."""
    place = PLACE + "{model}"
    modes = [(kind, "validation") for kind in kinds]
    _, found = models_json_schema(modes, ref_template=place, schema_generator=_Generator)  # type: ignore[arg-type]
    schemas: dict[str, JSON] = found["$defs"]
    for schema in schemas.values():
        for name, field in schema.get("properties", {}).items():
            _bound(name, field)
            if not field.keys() - {"default"}:
                field["description"] = "Ignored."
    return schemas


class _Generator(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # the title would repeat the field's name

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> JSON:
        """Describe a before-validator. All of ours turn a string into a list, except that of an integer."""
        inner = super().function_before_schema(schema)
        return inner if inner.get("type") == "integer" else {"anyOf": [{"type": "string"}, inner]}

    def function_after_schema(self, schema: core_schema.AfterValidatorFunctionSchema) -> JSON:
        match schema["function"]["function"]:
            case Only(neutral=neutral):
                description = "Not supported: " + (
                    "accepts only values without effect." if neutral else "accepts only null."
                )
                return {"enum": [None, *neutral], "description": description}
        return super().function_after_schema(schema)


def _bound(name: str, field: JSON) -> None:
    if name not in RANGES or name == _DEPENDS:
        return
    low, high, takes_low = RANGES[name]
    for either in field.get("anyOf", [field]):
        if either.get("type") in ("integer", "number"):
            either.update({"minimum" if takes_low else "exclusiveMinimum": low, "maximum": high})
