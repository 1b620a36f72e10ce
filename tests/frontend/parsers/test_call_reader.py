"""Parsing of calls does not depend on how the text is split, and loses no text."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.parsers.call_reader import CallReader
from frontend.parsers.formats import CALL_FORMATS, forced_call, forced_calls
from frontend.parsers.pieces import CallArguments, CallBegun, CallBroken, CallEnded, Piece
from tests.frontend.parsers.recorded import RECORDED, TOOLS, Recorded

_FORMATS = {name: kind.read for name, kind in CALL_FORMATS.items()}
_FORMATS |= {"forced_calls": forced_calls, "forced_call": partial(forced_call, name="now")}
_IDS = [f"{one.format}-{number}" for number, one in enumerate(RECORDED)]


def read(format: str, parts: Iterable[str]) -> list[Piece]:
    reader = CallReader(_FORMATS[format], TOOLS)
    return [*(piece for part in parts for piece in reader.add(part)), *reader.finish()]


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Merge adjacent texts and adjacent arguments."""
    whole: list[Piece] = []
    for piece in pieces:
        match whole[-1] if whole else None, piece:
            case str(before), str(after):
                whole[-1] = before + after
            case CallArguments(number, text), CallArguments(_, more):
                whole[-1] = CallArguments(number, text + more)
            case _:
                whole.append(piece)
    return whole


def decoded(parts: Iterable[bytes]) -> list[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    return [decoder.decode(part) for part in parts]


def calls_in(pieces: Iterable[Piece]) -> list[tuple[str, object]]:
    names = [piece.name for piece in pieces if isinstance(piece, CallBegun)]
    arguments = [piece.text for piece in pieces if isinstance(piece, CallArguments)]
    assert [piece.number for piece in pieces if isinstance(piece, CallEnded)] == list(range(len(names)))
    return [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]


@pytest.mark.parametrize("recorded", RECORDED, ids=_IDS)
def test_recorded_answers(recorded: Recorded) -> None:
    pieces = joined(read(recorded.format, [recorded.raw]))
    assert calls_in(pieces) == list(recorded.calls)
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    assert text == (recorded.raw if recorded.text == "=" else recorded.text)


@pytest.mark.parametrize("recorded", RECORDED, ids=_IDS)
def test_pieces_do_not_depend_on_the_split(recorded: Recorded) -> None:
    whole, raw = joined(read(recorded.format, [recorded.raw])), recorded.raw.encode()
    assert joined(read(recorded.format, decoded(bytes([byte]) for byte in raw))) == whole
    for at in range(len(raw) + 1):
        assert joined(read(recorded.format, decoded([raw[:at], raw[at:]]))) == whole


@pytest.mark.parametrize("recorded", RECORDED, ids=_IDS)
def test_truncated_answers_lose_no_text(recorded: Recorded) -> None:
    for end in range(len(recorded.raw)):
        check_nothing_is_lost(recorded.format, recorded.raw[:end])


@pytest.mark.parametrize(
    ("parameter", "begun"),
    [
        ('places>\n["a", "b', '{"places": ["a", "b'),
        ('places>\n["a"]\n</par', '{"places": ["a"]'),
        ("days>\n1", '{"days": 1'),
        ("days>\n", '{"days": '),
        ('units>\nme"t', '{"units": "me\\"t'),
        ("city>\nPar", '{"city": "Par'),
        ("days>\n12\n</parameter>\n<parameter=is_ex", '{"days": 12'),
        ("days>\n12\n</parameter>\n<parameter=is_exact>\ntr", '{"days": 12, "is_exact": tr'),
    ],
)
def test_parameter_that_is_cut_keeps_what_arrived(parameter: str, begun: str) -> None:
    raw = f"<tool_call>\n<function=get_weather>\n<parameter={parameter}"
    for parts in ([raw], raw):
        pieces = joined(read("qwen3_coder", parts))
        assert "".join(piece.text for piece in pieces if isinstance(piece, CallArguments)) == begun
        assert any(isinstance(piece, CallBroken) for piece in pieces)


def check_nothing_is_lost(format: str, raw: str) -> None:
    """Check that the raw answer consists of its text, its calls in order, and markup between them."""
    pieces = joined(read(format, raw))
    pattern = _MARKUP if any(isinstance(piece, CallEnded) for piece in pieces) else r"\s*"
    for at, piece in enumerate(pieces):
        match piece:
            case CallBroken():
                assert piece.raw.endswith(piece.rest)
                pattern += re.escape(piece.raw) + _MARKUP
            case str():
                pattern += re.escape(piece) + _MARKUP
            case CallArguments(number, text) if CallEnded(number) in pieces:
                begun = pieces[at - 1]
                assert isinstance(begun, CallBegun)
                name, written = re.escape(begun.name), f"(?:{re.escape(text)}|{re.escape(json.dumps(text))})?"
                if format == "forced_call":  # this format has no name
                    pattern += f"{_MARKUP}{written}{_MARKUP}"
                elif format in ("qwen3_coder", "pythonic"):  # arguments are not JSON in these formats
                    pattern += f"{_MARKUP}{name}.*?{_MARKUP}"
                else:
                    pattern += f"{_MARKUP}(?:{name}{_MARKUP}{written}|{written}{_MARKUP}{name}){_MARKUP}"
            case _:
                pass
    assert re.fullmatch(pattern, raw, re.DOTALL), (format, raw, pieces)


_MARKS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "a1", "abcdefghi"]
_MARKS += ['"name"', '"arguments"', '"parameters"', '"id"', '"type"', "function", "</function>", "</parameter>"]
_MARKS += ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"]  # noqa: RUF001
_MARKS += ["<｜tool▁sep｜>", "<function=", "<|python_start|>", "<|python_end|>", "```json", "```", *'[]{},:;"()>']  # noqa: RUF001
_MARKUP = rf"(?:\s|{'|'.join(map(re.escape, _MARKS))})*"


_WORDS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", "{", "}", ";"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "function"),  # noqa: RUF001
    *("<function=", "now", ">", "<parameter=", "city", "</parameter>", "</function>", "<|python_start|>", "now()"),
    *('{"name": "now"', ', "arguments": {', '"city": "Par', '\\"', '"', "}}", "\n", " ", "```json\n", "```", "é", "🎉"),
    *('{"name": "now", "arguments": {}}', "(city='a')", "get_weather", ",", ":", "1e5", "-", "null", "\\u00e", "text"),
]


@settings(max_examples=300, database=None)
@given(st.sampled_from(sorted(_FORMATS)), st.lists(st.sampled_from(_WORDS), max_size=14), st.data())
def test_random_text_is_read_the_same_in_pieces(format: str, words: list[str], data: st.DataObject) -> None:
    raw = "".join(words)
    whole = joined(read(format, [raw]))
    assert joined(read(format, raw)) == whole
    at = data.draw(st.integers(0, len(raw)))
    assert joined(read(format, [raw[:at], raw[at:]])) == whole
    for piece in whole:
        if isinstance(piece, CallArguments) and CallEnded(piece.number) in whole:
            assert isinstance(json.loads(piece.text), dict)
    check_nothing_is_lost(format, raw)


_DEFINITIONS = {
    "Item": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "Name": {"type": "string"},
    "Deep": {"allOf": [{"$ref": "#/$defs/Item"}]},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "null"}]},
}
_TYPED: list[tuple[Any, str, Any]] = [  # a parameter's schema, the text, and the value
    ({"$ref": "#/$defs/Item"}, '{"a": 1}', {"a": 1}),
    ({"$ref": "#/$defs/Deep"}, '{"a": 1}', {"a": 1}),
    ({"allOf": [{"$ref": "#/$defs/Item"}, {"description": "one"}]}, '{"a": 1}', {"a": 1}),
    ({"allOf": [{"type": "integer"}]}, "10", 10),
    ({"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}]}, "10", 10),
    ({"allOf": [{"type": "number"}, {"type": "integer"}]}, "10", 10),
    ({"enum": [1, 2]}, "2", 2),
    ({"enum": ["1", "2"]}, "2", "2"),
    ({"enum": [True, None]}, "True", True),
    ({"const": 5}, "5", 5),
    ({"const": "5"}, "5", "5"),
    ({"type": ["string", "integer"], "enum": [1, 2]}, "1", 1),
    ({"properties": {"k": {}}}, '{"k": 1}', {"k": 1}),
    ({"additionalProperties": True}, '{"k": 1}', {"k": 1}),
    ({"items": {"type": "integer"}}, "[1, 2]", [1, 2]),
    ({"anyOf": [{"$ref": "#/$defs/Name"}, {"type": "null"}]}, "10", "10"),
    ({"anyOf": [{"$ref": "#/$defs/Name"}, {"type": "null"}]}, "null", None),
    ({"anyOf": [{"$ref": "#/$defs/Item"}, {"type": "null"}]}, '{"a": 1}', {"a": 1}),
    ({"oneOf": [{"enum": [1]}, {"const": 2.5}]}, "2.5", 2.5),
    ({"type": "integer"}, "many", "many"),
    ({"$ref": "#/$defs/Loop"}, "null", "null"),
    ({"$ref": "#/$defs/Missing"}, "10", "10"),
    ({}, "10", "10"),
    (None, "10", "10"),
]


@pytest.mark.parametrize(("schema", "text", "value"), _TYPED)
@pytest.mark.parametrize("is_nested", [False, True])
def test_parameters_take_the_types_of_their_schema(schema: Any, text: str, value: Any, is_nested: bool) -> None:
    document: dict[str, Any] = {"type": "object", "properties": {"x": schema}, "$defs": _DEFINITIONS}
    if is_nested:
        document = {"$ref": "#/$defs/All", "$defs": {**_DEFINITIONS, "All": {"allOf": [{"properties": {"x": schema}}]}}}
    reader = CallReader(CALL_FORMATS["qwen3_coder"].read, {"f": document})
    pieces = reader.add(f"<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>")
    assert calls_in(joined(pieces)) == [("f", {"x": value})]


def test_types_of_a_hostile_schema_are_found_in_linear_time() -> None:
    """Each definition refers to the next one a hundred times."""
    definitions = {str(at): {"allOf": [{"$ref": f"#/$defs/{at + 1}"}] * 100} for at in range(300)}
    document = {"properties": {"x": {"$ref": "#/$defs/0"}}, "$defs": definitions, "$ref": "#/$defs/0"}
    reader = CallReader(CALL_FORMATS["qwen3_coder"].read, {"f": document})
    pieces = reader.add("<function=f>\n<parameter=x>\n10\n</parameter>\n<parameter=y>\n10\n</parameter></function>")
    assert calls_in(joined(pieces)) == [("f", {"x": "10", "y": "10"})]
