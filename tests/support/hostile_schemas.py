"""Expensive and invalid schemas: name and text of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

REFUSED, EITHER = True, False  # whether a strict schema is rejected; EITHER: a quick answer is fine, too


def hostile_schemas() -> dict[str, tuple[str, bool]]:
    found: dict[str, tuple[str, bool]] = {}
    for group, is_refused in ((_malformed, REFUSED), (_wrong, REFUSED), (_endless, REFUSED), (_large, EITHER)):
        for name, schema in group():
            found[name] = (schema if isinstance(schema, str) else json.dumps(schema), is_refused)
    return found


def _malformed() -> Iterator[tuple[str, Any]]:
    yield "no JSON", '{"type"'
    yield "a list", "[]"
    yield "a number", "7"
    yield "half a character", r'{"const": "\ud800"}'
    yield "half a character as a name", r'{"type": "object", "properties": {"\udfff": {}}}'
    yield "an unknown escape", r'{"const": "\x"}'
    yield "bytes that are no UTF-8", '{"const": "\udcff\udcfe"}'
    yield "no number", '{"minimum": NaN}'
    yield "60,000 brackets", "[" * 60_000
    yield "2,500 arrays in each other", '{"type":"array","items":' * 2500 + "{}" + "}" * 2500
    yield "more than 64 KiB", {"description": "a" * 66_000, "type": "null"}
    yield "64 KiB of surrogates", '{"const": "' + r"\ud800" * 10_900 + '"}'


def _wrong() -> Iterator[tuple[str, Any]]:
    yield from (
        ("an unknown type", {"type": "strange"}),
        ("a type that is a number", {"type": 3}),
        ("properties in a list", {"properties": [1]}),
        ("required, no list", {"required": "a"}),
        ("an enum that is none", {"enum": "a"}),
        ("an empty enum", {"enum": []}),
        ("a negative length", {"minLength": -1}),
        ("bounds of 400 digits", {"minItems": 10**400}),
        ("bounds that exclude each other", {"type": "integer", "minimum": 5, "maximum": 3}),
        ("lengths that do", {"type": "string", "minLength": 5, "maxLength": 3}),
        ("types that do", {"allOf": [{"type": "string"}, {"type": "integer"}]}),
        ("a keyword that cannot be enforced", {"type": "array", "uniqueItems": True}),
        ("a schema from elsewhere", {"$ref": "http://127.0.0.1:1/schema"}),
        ("a file", {"$ref": "file:///etc/passwd"}),
        ("a reference to nowhere", {"$ref": "#/nowhere"}),
        ("a meta-schema from elsewhere", {"$schema": "http://127.0.0.1:1/meta", "type": "string"}),
    )


def _endless() -> Iterator[tuple[str, Any]]:
    yield "itself", {"$ref": "#"}
    yield "a ring", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    yield "an object that needs itself", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    yield "an array that needs itself", {"type": "array", "items": {"$ref": "#"}, "minItems": 1}


def _large() -> Iterator[tuple[str, Any]]:
    yield "4,000 words", {"enum": [f"word {i}" for i in range(4000)]}
    yield "one word of 60,000 letters", {"const": "a" * 60_000}
    yield "1,900 properties", {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1900)}}
    yield "6,000 that are required", {"type": "object", "required": [f"r{i}" for i in range(6000)]}
    yield "900 kinds of objects", {"anyOf": [{"type": "object", "properties": {f"p{i}": {}}} for i in range(900)]}
    choices = [[{"properties": {f"a{i}": {"const": j}}} for j in range(4)] for i in range(9)]
    yield "4 ** 9 combinations", {"allOf": [{"anyOf": some} for some in choices]}
    for keyword in ("anyOf", "allOf"):
        yield f"2 ** 30 ways by {keyword}", _web(lambda next, keyword=keyword: {keyword: [next, next]})
    both = {"type": "object", "required": ["a", "b"]}
    yield "2 ** 30 objects", _web(lambda next: {**both, "properties": {"a": next, "b": next}})
    yield "9 ** 30 items", _web(lambda next: {"type": "array", "minItems": 9, "items": next})
    yield "a million items", {"type": "array", "items": {"type": "null"}, "minItems": 10**6}
    yield "two milliard letters", {"type": "string", "maxLength": 2**31}
    yield "multiples of a large prime", {"type": "integer", "multipleOf": 999_983}
    yield "multiples of two primes", {"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]}
    steps = [{"type": "integer", "multipleOf": 5003 + i} for i in range(100)]
    yield "100 large multiples", {"type": "array", "prefixItems": steps}
    ranges = [{"type": "number", "minimum": 0.123456789 + i, "maximum": 98765.4321 + i} for i in range(900)]
    yield "900 ranges", {"type": "array", "prefixItems": ranges}
    for name, pattern in (
        ("stars in a star", "^(((a+)+)+)+$"),
        ("200 stars", "(a|a)*" * 200 + "b"),
        ("a hundred times a hundred, and so on", "^(((a{1,100}){1,100}){1,100}){1,100}$"),
        ("100,000 of any", "^.{0,100000}$"),
        ("an end that is known late", "(x|y)*a(x|y){400}$"),
        ("classes of all letters", r"^[\p{L}\p{N}]{1,200}\w{1,50}(\w\d){1,50}\s\S{30}.*[^a]{40}b$"),
        ("7,000 choices", "(ab|cd)?" * 7000),
        ("30,000 groups", "(" * 30_000 + ")" * 30_000),
    ):
        yield f"a pattern: {name}", {"type": "string", "pattern": pattern}
    several = [{"type": "string", "pattern": f"{letter}.{{{i + 9}}}x"} for i, letter in enumerate("abcdefghijklmnop")]
    yield "16 patterns at once", {"allOf": several}
    names = {f"^{i}.*x.{{9}}{i}$": {} for i in range(300)}
    yield "300 patterns of names", {"type": "object", "patternProperties": names}
    dates = [{"type": "string", "format": "date-time", "pattern": f"{i}"} for i in range(900)]
    yield "900 kinds of dates", {"type": "array", "prefixItems": dates}


def _web(part: Any) -> dict[str, Any]:
    """Return 30 definitions, each of which refers to the next one twice."""
    definitions = {f"d{i}": part({"$ref": f"#/$defs/d{i + 1}"}) for i in range(30)}
    return {"$defs": {**definitions, "d30": {"type": "string"}}, "$ref": "#/$defs/d0"}
