"""JSON schemas, drawn by Hypothesis: the same ones every time."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

Schema = dict[str, Any]

_NAMES = st.sampled_from(["name", "size", "is_open", "tags", "an odd key", "ключ", 'quo"te'])
_WORDS = st.sampled_from(["red", "green", "blå", "", 'a "b"', 0, -7, 2.5, True, None])
_LENGTH = st.integers(0, 4)


def schemas(count: int) -> list[Schema]:
    """So many."""
    found: list[Schema] = []

    @settings(max_examples=count, derandomize=True, database=None, phases=[Phase.generate], deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(_objects(_values()))
    def collect(schema: Schema) -> None:
        found.append(schema)

    collect()
    return found


def _values() -> st.SearchStrategy[Schema]:
    return st.recursive(_leaves(), lambda inner: _arrays(inner) | _objects(inner) | _any_of(inner), max_leaves=6)


def _leaves() -> st.SearchStrategy[Schema]:
    return st.one_of(
        st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": "number"}, {"type": ["string", "null"]}]),
        st.lists(_WORDS, min_size=1, max_size=4).map(lambda words: {"enum": words}),
        _WORDS.map(lambda word: {"const": word}),
        st.tuples(st.integers(-99, 9), st.integers(10, 9999)).map(
            lambda ends: {"type": "integer", "minimum": ends[0], "maximum": ends[1]}
        ),
        st.tuples(_LENGTH, _LENGTH).map(
            lambda sizes: {"type": "string", "minLength": sizes[0], "maxLength": sum(sizes)}
        ),
    )


def _arrays(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.tuples(inner, _LENGTH, _LENGTH).map(
        lambda of: {"type": "array", "items": of[0], "minItems": of[1], "maxItems": of[1] + of[2]}
    )


def _any_of(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some})


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(_NAMES, inner, min_size=1, max_size=4))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
    closed = {"additionalProperties": False} if draw(st.booleans()) else {}
    return {"type": "object", "properties": properties, "required": required, **closed}
