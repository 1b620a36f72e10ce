"""Parsing cost is linear in the answer, and no answer raises an error."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from frontend.parsers.call_reader import CallReader
from frontend.parsers.formats import CALL_FORMATS
from frontend.parsers.scanner import CallArguments, Piece
from tests.support.growth import growth

_TOOLS: dict[str, dict[str, object]] = {"f": {"properties": {"a": {"type": "integer"}}}}
_BEGUN = '<tool_call>{"name": "f", "arguments": {"a": '
COSTLY: dict[str, tuple[str, int, Callable[[int], list[str]]]] = {
    "python's calls in each other": ("pythonic", 400, lambda n: ["<|python_start|>[f(" * n]),
    "and closed": ("pythonic", 400, lambda n: ["<|python_start|>[f(" * n + ")" * n]),
    "a number by its digits": ("hermes", 8000, lambda n: [_BEGUN, "1" * n]),
    "and behind the point": ("hermes", 8000, lambda n: [_BEGUN, "0." + "1" * n]),
    "calls in lines": ("generic", 400, lambda n: ['\n{"type": [' * n]),
    "and in a list": ("generic", 400, lambda n: ['\n[{"type": "', '\n{"id": []},' * n]),
    "Gemma's objects in each other": ("gemma4", 4000, lambda n: ["<|tool_call>call:f" + "{a:" * n]),
    "Gemma's string by its characters": ("gemma4", 2000, lambda n: ['<|tool_call>call:f{a:<|"|>', *'<|"' * n]),
    "values without an end": ("glm45", 2000, lambda n: ["<tool_call>f<arg_key>a</arg_key><arg_value>1" * n]),
    "calls that are none": ("kimi_k2", 2000, lambda n: ["<|tool_calls_section_begin|><|tool_call_begin|>" * n]),
    "a call by its characters": ("hermes", 2000, lambda n: ['<tool_call>{"type": "', *"a" * n]),
}


def read(format: str, parts: list[str], tools: dict[str, dict[str, object]] = _TOOLS) -> list[Piece]:
    reader = CallReader(CALL_FORMATS[format].read, tools)
    return [*(piece for part in parts for piece in reader.add(part)), *reader.finish()]


@pytest.mark.parametrize(("format", "size", "parts"), COSTLY.values(), ids=COSTLY)
def test_each_character_is_read_a_few_times_at_most(format: str, size: int, parts: Callable[[int], list[str]]) -> None:
    assert growth(lambda n: read(format, parts(n)), size) < 9


@pytest.mark.parametrize("parts", [["<|python_start|>[f(" * 3], ["<|python_start|>[f(" * 3 + ")))"], [*"[f([a='x"]])
def test_invalid_python_call_is_text(parts: list[str]) -> None:
    assert "".join(str(piece) for piece in read("pythonic", parts)) == "".join(parts)


@pytest.mark.parametrize(
    ("number", "is_one"),
    [
        *((number, True) for number in ("1" * 5000, "-10.25e-310", "1." + "0" * 500 + "e" + "9" * 9)),
        *((number, False) for number in ("0123", "0" * 9, "1.", "1e", "1e5.", "1-", "12x", "1.5.5")),
    ],
)
def test_number_of_any_length_is_one_number(number: str, is_one: bool) -> None:
    for parts in ([f"{_BEGUN}{number}}}}}</tool_call>"], [*f"{_BEGUN}{number}}}}}</tool_call>"]):
        said = "".join(piece.text for piece in read("hermes", parts) if isinstance(piece, CallArguments))
        assert (said == f'{{"a": {number}}}') is is_one


@pytest.mark.parametrize(
    ("format", "raw"),
    [
        ("pythonic", "[f(a='\\ud800')]"),
        ("hermes", '<tool_call>{"arguments": "{\\"a\\": \\"\\ud800\\"}", "name": "f"}</tool_call>'),
    ],
)
def test_arguments_contain_no_lone_surrogates(format: str, raw: str) -> None:
    pieces = read(format, [raw])
    assert "".join(str(piece) for piece in pieces) == raw  # kept as text
    assert not any(isinstance(piece, CallArguments) for piece in pieces)


@pytest.mark.parametrize("about", [{"type": 5}, {"type": [5]}, {"anyOf": None}, {"oneOf": 3, "type": "integer"}, 7])
def test_schema_can_contain_anything(about: object) -> None:
    raw = "<function=f><parameter=a>1</parameter></function>"
    said = [piece.text for piece in read("qwen3_coder", [raw], {"f": {"properties": {"a": about}}})
            if isinstance(piece, CallArguments)]  # fmt: skip
    assert json.loads("".join(said))["a"] in (1, "1")
