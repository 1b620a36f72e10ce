"""Constraint fields under OpenAI's, vLLM's and llama.cpp's names."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from core.types.constraints import ANY_OBJECT, Grammar, GrammarKind
from core.types.errors import RequestError
from frontend.openai.fields import ignored_header
from frontend.openai.types import TextBody

_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_STRICT, _LENIENT = (
    Grammar(kind=kind, text=json.dumps(_SCHEMA)) for kind in (GrammarKind.JSON_SCHEMA, GrammarKind.LENIENT_JSON_SCHEMA)
)
_FORMAT = {"type": "const_string", "value": "a"}
_OLD = {"structures": [{"begin": "<a>", "schema": _SCHEMA, "end": "</a>"}], "triggers": ["<a"]}
_TAG = Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=json.dumps({"format": _FORMAT}))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": {"type": "json_object", "schema": _SCHEMA}}, _LENIENT),
        ({"response_format": {"type": "json_object", "schema": None, "json_schema": None}}, ANY_OBJECT),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}}}, _LENIENT),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": _SCHEMA, "strict": True},
                }
            },
            _STRICT,
        ),
        (
            {
                "structured_outputs": {
                    "json": _SCHEMA,
                    "regex": None,
                    "json_object": False,
                    "disable_any_whitespace": True,
                    "disable_fallback": True,
                    "disable_additional_properties": False,
                    "whitespace_pattern": None,
                    "structural_tag": None,
                }
            },
            _STRICT,
        ),
        ({"response_format": {"type": "structural_tag", "format": _FORMAT}}, _TAG),
        ({"response_format": {"type": "structural_tag", **_OLD}}, replace(_TAG, text=json.dumps(_OLD))),
        ({"structured_outputs": {"structural_tag": json.dumps({"format": _FORMAT})}}, _TAG),
        ({"structured_outputs": {"structural_tag": {"format": _FORMAT}}}, _TAG),
    ],
    ids=lambda value: str(value)[:60],
)
def test_constraints_under_all_names(fields: dict[str, Any], expected: Grammar) -> None:
    body = TextBody.model_validate_json(json.dumps({"prompt": "a", **fields}))
    (request,) = body.requests("r")
    assert request.grammar == expected and not ignored_header(body)


def test_structural_tag_fields_require_the_type() -> None:
    body = TextBody.model_validate({"prompt": "a", "response_format": {"type": "json_object", "format": _FORMAT}})
    with pytest.raises(RequestError, match="requires type structural_tag") as rejected:
        body.requests("r")
    assert rejected.value.param == "response_format.format"


def test_unknown_fields_are_ignored_and_listed() -> None:
    form = {"type": "json_schema", "mood": 1, "json_schema": {"name": "s", "schema": _SCHEMA, "note": 1, "more": None}}
    body = TextBody.model_validate_json(json.dumps({"prompt": "a", "response_format": form}))
    named = set(ignored_header(body)["x-ignored-fields"].split(", "))
    assert named == {"response_format.mood", "response_format.json_schema.note"}
