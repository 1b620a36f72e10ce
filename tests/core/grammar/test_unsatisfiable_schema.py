"""Finite instances of schemas that refer to themselves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from core.grammar.strict_schema import is_endless
from tests.support.growth import growth

_HERE = {"$ref": "#"}


def _needs(part: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": part}, "required": ["a"], **more}


def _defined(**schemas: Any) -> dict[str, Any]:
    return {"$defs": schemas, "$ref": "#/$defs/a"}


_A, _B, _C = ({"$ref": f"#/$defs/{name}"} for name in "abc")


@pytest.mark.parametrize(
    "schema",
    [
        _HERE,
        {"anyOf": [_HERE, _HERE]},
        {"allOf": [_HERE], "type": "string"},
        _needs(_HERE),
        _needs({"anyOf": [_HERE, _needs(_HERE)]}),
        {"type": "array", "items": _HERE, "minItems": 1},
        {"type": "array", "prefixItems": [{"type": "null"}, _HERE], "minItems": 2},
        {"type": ["array", "object"], "items": _HERE, "minItems": 1, "properties": {"a": _HERE}, "required": ["a"]},
        _defined(a=_needs(_B), b=_needs(_C), c=_needs(_A)),
        _defined(a=_B, b=_A),
        _needs({"$ref": "#/properties/a"}),
    ],
)
def test_self_referencing_schema_is_endless(schema: Any) -> None:
    assert is_endless(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"type": "object", "properties": {"a": _HERE}},
        {"type": "array", "items": _HERE},
        {"properties": {"a": _HERE}, "required": ["a"]},  # a number is valid
        _needs({"anyOf": [{"type": "null"}, _HERE]}),
        _needs({**_HERE, "enum": [1]}),
        _needs({"type": ["null", "object"], "properties": {"b": _HERE}, "required": ["b"]}),
        {"type": "array", "prefixItems": [{}, _HERE], "minItems": 1},
        _defined(a=_needs(_B), b={"anyOf": [_needs(_A), _C]}, c={"type": "integer"}),
        _defined(a=_needs(_C), b={}, c=_B),
        _defined(**{"a": {"$ref": "#/$defs/~1x%25"}, "/x%": {"type": "null"}}),
        {"$ref": "http://elsewhere/"},
        {"$ref": "#anchor"},
    ],
)
def test_schema_with_a_finite_instance_is_not_endless(schema: Any) -> None:
    assert not is_endless(schema)


def test_web_of_references_takes_linear_time() -> None:
    def look(count: int) -> bool:
        web: dict[str, Any] = {"$ref": "#"}
        for i in range(count // 100):
            web = {"anyOf": [_needs(web), *({"$ref": "#" + "/anyOf/0/properties/a" * (i % 9)} for _ in range(50))]}
        return is_endless(json.loads(json.dumps(web)))

    assert look(4000) and growth(look, 1000) < 10


def test_chain_of_references_takes_linear_time_and_is_followed_to_its_end() -> None:
    def chain(count: int, end: Any) -> Any:
        return {"$defs": {str(i): _needs({"$ref": f"#/$defs/{i + 1}"}) for i in range(count)} | {str(count): end}}

    def look(count: int) -> bool:
        return is_endless({**chain(count, {"type": "null"}), "$ref": "#/$defs/0"})

    assert not look(1000) and growth(look, 1000) < 10
    assert is_endless({**chain(100, {"type": "null"}), "$ref": "#/$defs/0", "allOf": [_HERE]})
