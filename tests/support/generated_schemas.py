"""Random JSON schemas, drawn by Hypothesis: the same ones in every run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

Schema = dict[str, Any]

_NAMES = st.sampled_from(["name", "size", "is_open", "tags", "an odd key", "ключ", 'quo"te'])
_WORDS = st.sampled_from(["red", "green", "blå", "", 'a "b"', 0, -7, 2.5, True, None])
_LENGTH = st.integers(0, 4)
_FORMATS = st.sampled_from(["date", "time", "date-time", "uuid", "ipv4", "ipv6", "email"])
_PATTERNS = st.sampled_from(
    ["^[a-z]{2,5}$", "^(yes|no)$", "[0-9]", "^[A-Z][a-z]+( [A-Z][a-z]+)?$", r"^\+?[0-9 .()-]{3,9}$"]
)
_TREE = {  # recursive, with finite instances
    "type": "object",
    "properties": {"leaf": {"type": "integer"}, "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}},
    "required": ["leaf", "left"],
    "additionalProperties": False,
}


def schemas(count: int) -> list[Schema]:
    """Return `count` schemas. A separate interpreter draws them: Hypothesis also draws constants of the loaded modules,
    so results would depend on other tests and on any changed number."""
    command = [sys.executable, "-m", "tests.support.generated_schemas", str(count)]
    root = Path(__file__).parents[2]
    drawn = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, timeout=300)
    found: list[Schema] = json.loads(drawn.stdout)
    return found


def _draw(count: int) -> list[Schema]:
    found: list[Schema] = []

    @settings(max_examples=count, derandomize=True, database=None, phases=[Phase.generate], deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(_objects(_values()))
    def collect(schema: Schema) -> None:
        found.append(schema | {"$defs": {"tree": _TREE}} if "#/$defs/tree" in repr(schema) else schema)

    collect()
    return found


def _values() -> st.SearchStrategy[Schema]:
    return st.recursive(
        _leaves(),
        lambda inner: st.one_of(_arrays(inner), _tuples(inner), _objects(inner), _any_of(inner), _all_of(inner)),
        max_leaves=6,
    )


def _leaves() -> st.SearchStrategy[Schema]:
    return st.one_of(
        st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": "number"}, {"type": ["string", "null"]}, {}]),
        st.lists(_WORDS, min_size=1, max_size=4).map(lambda words: {"enum": words}),
        _WORDS.map(lambda word: {"const": word}),
        _numbers(),
        st.tuples(_LENGTH, _LENGTH).map(
            lambda sizes: {"type": "string", "minLength": sizes[0], "maxLength": sum(sizes)}
        ),
        _FORMATS.map(lambda form: {"type": "string", "format": form}),
        _PATTERNS.map(lambda pattern: {"type": "string", "pattern": pattern}),
        st.just({"$ref": "#/$defs/tree"}),
    )


def _numbers() -> st.SearchStrategy[Schema]:
    ends = st.tuples(st.integers(-99, 9), st.integers(10, 9999))
    low, high = st.sampled_from(["minimum", "exclusiveMinimum"]), st.sampled_from(["maximum", "exclusiveMaximum"])
    bounds = st.tuples(low, high, ends).map(lambda of: {of[0]: of[2][0], of[1]: of[2][1]})
    steps = st.sampled_from([{}, {}, {"multipleOf": 3}, {"multipleOf": 0.25}])
    kinds = st.sampled_from([{"type": "integer"}, {"type": "integer"}, {"type": "number"}])
    return st.tuples(kinds, bounds, steps).map(lambda parts: parts[0] | parts[1] | parts[2])


def _arrays(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.tuples(inner, _LENGTH, _LENGTH).map(
        lambda of: {"type": "array", "items": of[0], "minItems": of[1], "maxItems": of[1] + of[2]}
    )


def _tuples(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.tuples(st.lists(inner, min_size=1, max_size=3), inner | st.just(False)).map(
        lambda of: {"type": "array", "prefixItems": of[0], "items": of[1], "minItems": len(of[0])}
    )


def _any_of(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some})


@st.composite
def _all_of(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    """Objects whose properties are defined in several subschemas."""
    names = draw(st.lists(_NAMES, min_size=2, max_size=3, unique=True))
    parts = [{"properties": {name: draw(inner)}, "required": [name]} for name in names]
    return {"type": "object", "allOf": parts[1:], **parts[0]}


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(_NAMES, inner, min_size=1, max_size=4))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
    others = draw(st.sampled_from(["any", "none", "none", "counted", "named"]))
    more: Schema = {"none": {"additionalProperties": False}}.get(others, {})
    if others == "counted":  # llguidance supports it only if every named property is required
        required, most = sorted(properties), len(properties) + 1
        more = {"additionalProperties": draw(inner), "minProperties": most, "maxProperties": most}
    if others == "named":
        more = {"patternProperties": {"^x_[0-9]{1,3}$": draw(inner)}, "additionalProperties": False}
    return {"type": "object", "properties": properties, "required": required, **more}


if __name__ == "__main__":
    json.dump(_draw(int(sys.argv[1])), sys.stdout)
