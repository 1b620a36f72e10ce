"""HTML page of an OpenAPI document, without scripts or external resources."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from json import dumps

from frontend.http.json_response import JSON
from frontend.http.openapi_schemas import PLACE

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
