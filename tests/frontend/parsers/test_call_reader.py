"""Parsing of calls: the split of the text does not matter, no text is lost, and the cost is linear."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.parsers.formats import CALL_FORMATS, forced_call, forced_calls
from frontend.parsers.scanner import CallArguments, CallBegun, CallBroken, CallEnded, CallReader, Piece, Thought
from tests.frontend.parsers.recorded import RECORDED, TOOLS, Recorded
from tests.support.grids import quick
from tests.support.growth import growth

_FORMATS = {name: kind.read for name, kind in CALL_FORMATS.items()}
_FORMATS |= {"forced_calls": forced_calls, "forced_call": partial(forced_call, name="now")}
_IDS = [f"{one.format}-{number}" for number, one in enumerate(RECORDED)]


def read(format: str, parts: Iterable[str], tools: dict[str, Any] = TOOLS) -> list[Piece]:
    reader = CallReader(_FORMATS[format], tools)
    return [*(piece for part in parts for piece in reader.add(part)), *reader.finish()]


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Merge adjacent texts and adjacent arguments."""
    whole: list[Piece] = []
    for piece in pieces:
        match whole[-1] if whole else None, piece:
            case str(before), str(after):
                whole[-1] = before + after
            case Thought(before), Thought(after):
                whole[-1] = Thought(before + after)
            case CallArguments(number, text), CallArguments(_, more):
                whole[-1] = CallArguments(number, text + more)
            case _:
                whole.append(piece)
    return whole


def decoded(parts: Iterable[bytes]) -> list[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    return [decoder.decode(part) for part in parts]


def calls_in(pieces: Sequence[Piece]) -> list[tuple[str, object]]:
    """Return the whole calls of joined pieces."""
    names = {piece.number: piece.name for piece in pieces if isinstance(piece, CallBegun)}
    arguments = {piece.number: piece.text for piece in pieces if isinstance(piece, CallArguments)}
    ended = [piece.number for piece in pieces if isinstance(piece, CallEnded)]
    broken = [piece.number for piece in pieces if isinstance(piece, CallBroken)]
    assert sorted([*ended, *broken]) == list(names) == list(range(len(names)))
    return [(names[number], json.loads(arguments[number])) for number in ended]


def text_of(pieces: Iterable[Piece]) -> str:
    """Return the text of a whole answer, which holds broken calls."""
    return "".join(
        piece if isinstance(piece, str) else piece.raw for piece in pieces if isinstance(piece, str | CallBroken)
    )


@pytest.mark.parametrize("recorded", RECORDED, ids=_IDS)
def test_recorded_answers(recorded: Recorded) -> None:
    pieces = joined(read(recorded.format, [recorded.raw]))
    assert calls_in(pieces) == list(recorded.calls)
    assert text_of(pieces) == (recorded.raw if recorded.text == "=" else recorded.text)
    assert "".join(piece.text for piece in pieces if isinstance(piece, Thought)) == recorded.thinking


@pytest.mark.parametrize("recorded", RECORDED, ids=_IDS)
def test_pieces_do_not_depend_on_the_split(recorded: Recorded) -> None:
    whole, raw = joined(read(recorded.format, [recorded.raw])), recorded.raw.encode()
    assert joined(read(recorded.format, decoded(bytes([byte]) for byte in raw))) == whole
    for at in range(len(raw) + 1):
        assert joined(read(recorded.format, decoded([raw[:at], raw[at:]]))) == whole


@pytest.mark.parametrize("first", quick(range(3), {1}))
@pytest.mark.parametrize("recorded", RECORDED, ids=_IDS)
def test_truncated_answers_lose_no_text(recorded: Recorded, first: int) -> None:
    for end in range(first, len(recorded.raw), 3):
        check_nothing_is_lost(recorded.format, recorded.raw[:end])


_PARAMETERS = {  # beginning of a call, a parameter, the parameter's end
    "qwen3_coder": ("<tool_call>\n<function=get_weather>", "\n<parameter=KEY>\nVALUE", "\n</parameter>"),
    "glm45": ("<tool_call>get_weather", "\n<arg_key>KEY</arg_key>\n<arg_value>VALUE", "</arg_value>"),
    "minimax_m2": ('<invoke name="get_weather">', '\n<parameter name="KEY">VALUE', "</parameter>"),
    "deepseek_v32": (
        '<｜DSML｜invoke name="get_weather">',  # noqa: RUF001
        '\n<｜DSML｜parameter name="KEY">VALUE',  # noqa: RUF001
        "</｜DSML｜parameter>",  # noqa: RUF001
    ),
}


def _cut() -> Iterator[tuple[str, str, str]]:
    """Yield formats, answers that end within a parameter, and the arguments so far."""
    for format, (call, parameter, end) in _PARAMETERS.items():
        first = parameter.replace("KEY", "days").replace("VALUE", "12") + end
        yield format, call + first + parameter.partition("KEY")[0] + "is_ex", '{"days": 12'
        yield (
            format,
            call + first + parameter.replace("KEY", "is_exact").replace("VALUE", "tr"),
            ('{"days": 12, "is_exact": tr'),
        )
        for key, value, begun in (
            ("places", '["a", "b', '["a", "b'),
            ("days", "1", "1"),
            ("days", "", ""),
            ("days", "1 [", '"1 ['),
            ("is_exact", "Tru", '"Tru'),
            ("units", 'me"t', '"me\\"t'),
            ("city", "Par", '"Par'),
        ):
            raw = call + parameter.replace("KEY", key).replace("VALUE", value)
            yield from ((format, raw + end[:num], f'{{"{key}": {begun}') for num in (0, len(end) - 1))
    for raw, begun in (
        ("days:12,is_ex", '{"days": 12, '),
        ("days:12,is_exact:tr", '{"days": 12, "is_exact": tr'),
        ('places:[<|"|>a<|"|>,1<|"', '{"places": ["a", 1'),
        ('city:<|"|>Par<|', '{"city": "Par'),
    ):
        yield "gemma4", f"<|tool_call>call:get_weather{{{raw}", begun


@pytest.mark.parametrize(("format", "raw", "begun"), [*_cut()])
def test_parameter_that_is_cut_keeps_what_arrived(format: str, raw: str, begun: str) -> None:
    for parts in ([raw], raw):
        pieces = joined(read(format, parts))
        assert "".join(piece.text for piece in pieces if isinstance(piece, CallArguments)) == begun
        assert any(isinstance(piece, CallBroken) for piece in pieces)


def check_nothing_is_lost(format: str, raw: str) -> None:
    """Check that the raw answer consists of its text, its calls in order, and markup between them."""
    pieces, markup = joined(read(format, raw)), _markup(format)
    has_markup = format == "openai" or any(isinstance(piece, CallEnded) for piece in pieces)
    pattern = markup if has_markup else r"\s*"
    for at, piece in enumerate(pieces):
        match piece:
            case CallBroken():
                assert piece.raw.endswith(piece.rest)
                pattern += re.escape(piece.raw) + markup
            case str() | Thought():
                text = piece if isinstance(piece, str) else piece.text
                parts = text.split("\n\n") if format == "openai" else [text]  # inserted between messages
                pattern += markup.join(map(re.escape, parts)) + markup
            case CallArguments(number, text) if CallEnded(number) in pieces:
                begun = pieces[at - 1]
                assert isinstance(begun, CallBegun)
                name, quoted = re.escape(begun.name), re.escape(json.dumps(text)[1:-1])
                written = rf'(?:{_repaired(text)}|"\s*{quoted}\s*")?'
                if format == "forced_call":  # this format has no name
                    pattern += f"{markup}{written}{markup}"
                elif format in _NOT_JSON:
                    values = "".join(
                        f".*?{re.escape(value)}" for value in _texts(json.loads(text, object_pairs_hook=list))
                    )
                    pattern += f"{markup}{name}{values if format in _RAW_STRINGS else ''}.*?{markup}"
                else:
                    pattern += f"{markup}(?:{name}{markup}{written}|{written}{markup}{name}){markup}"
            case _:
                pass
    assert re.fullmatch(pattern, raw, re.DOTALL), (format, raw, pieces)


_REPAIRED = re.compile(r"(\\u[0-9a-f]{4}|\\.|\s*[}\]]|true|false|null)")
_PYTHONS = {"true": "True", "false": "False", "null": "None"}


def _repaired(arguments: str) -> str:
    """Return a pattern of what a model may have written for these arguments, which are JSON in any case."""

    def written(part: str) -> str:
        if part.endswith(("}", "]")) and part.strip() in "}]":
            return rf"\s*(?:,\s*)?\{part[-1]}"
        if part in _PYTHONS:
            return f"(?:{part}|{_PYTHONS[part]})"
        if not part.startswith("\\"):
            return re.escape(part)
        return rf"(?:{re.escape(part)}|\\?{re.escape(json.loads(chr(34) + part + chr(34)))})"

    return "".join(map(written, _REPAIRED.split(arguments)))


def _texts(value: object) -> Iterator[str]:
    """Yield the strings and keys of a call's arguments, which are lists of pairs: a key may be repeated."""
    match value:
        case str():
            yield value
        case list() | tuple():
            yield from chain.from_iterable(map(_texts, value))


_RAW_STRINGS = {"qwen3_coder", "glm45", "glm47", "minimax_m2", "deepseek_v32", "gemma4"}  # strings without escapes
_NOT_JSON = {*_RAW_STRINGS, "pythonic", "llama4_pythonic"}
# Parts with any content: other members of a call, and Mistral's id.
_ANY = r'"(?:type|id)"\s*:\s*(?:"(?:\\.|[^"\\])*"|[\[{].*?[\]}]|[^\s",{}\[\]]+)|\[CALL_ID\].*?\[ARGS\]'
_MARKS: dict[str, list[str]] = {  # beside the markers and those of JSON
    "deepseek_v3": ["function", "```json", "```"],
    "gemma4": ["call:"],
    "generic": ["```json", "```"],
    "kimi_k2": ["functions.", *"0123456789"],
    "openai": ["assistant", "analysis", "commentary", "final", "to=functions.", "to=", "json", "code", "python"],
    "pythonic": ["<|python_start|>", "<|python_end|>"],
}


@cache
def _markup(format: str) -> str:
    """Return a pattern of everything in a format's calls but names and arguments."""
    marks = {*_MARKS.get(format, ()), '"name"', '"arguments"', '"parameters"', *'[]{},:;"'}
    marks |= {*CALL_FORMATS[format].markers} - {""} if format in CALL_FORMATS else set()
    return rf"(?:\s|{_ANY}|{'|'.join(map(re.escape, sorted(marks, key=len, reverse=True)))})*"


_PARTS = re.compile(r"</?[^<>\s]*>?|[\w]+|\s|.", re.DOTALL)
_WORDS = sorted({part for one in RECORDED for part in _PARTS.findall(one.raw)} | {'\\"', "1e5", "\\u00e", "</", "<|"})


@st.composite
def broken_answers(draw: st.DrawFn) -> tuple[str, str]:
    """Return a format, and a recorded answer of it with some parts lost, repeated, swapped or added."""
    recorded = draw(st.sampled_from(RECORDED))
    parts = _PARTS.findall(recorded.raw)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(parts)))
        own = draw(st.sampled_from(parts)) if parts else ""
        parts[at : at + draw(st.integers(0, 2))] = draw(
            st.sampled_from(
                ((), (own,), parts[at : at + 1] * 2, parts[at : at + 2][::-1], (draw(st.sampled_from(_WORDS)),))
            )
        )
    return recorded.format, "".join(parts)


@settings(max_examples=4 * settings().max_examples, database=None, derandomize=True)
@given(broken_answers(), st.data())
def test_broken_answers_are_read_the_same_in_pieces(answer: tuple[str, str], data: st.DataObject) -> None:
    format, raw = answer
    whole = joined(read(format, [raw]))
    assert joined(read(format, raw)) == whole
    at = data.draw(st.integers(0, len(raw)))
    assert joined(read(format, [raw[:at], raw[at:]])) == whole
    assert all(isinstance(arguments, dict) for _, arguments in calls_in(whole))
    if format != "openai":  # drops what else a header has
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


@pytest.mark.parametrize("text", ["{'a': 1}, b={}", "{'a': open('x')}", "{1, 2}", "[" * 999, "{**{}}", "['\\ud800']"])
def test_only_literals_of_python_become_json(text: str) -> None:
    reader = CallReader(CALL_FORMATS["qwen3_coder"].read, {"f": {"properties": {"x": {"type": "object"}}}})
    pieces = reader.add(f"<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>")
    assert calls_in(joined(pieces)) == [("f", {"x": text})]


def test_name_that_is_none_in_python_is_called_in_its_syntax() -> None:
    pieces = joined(read("pythonic", ["[get-it(a=1), class(a=2)]"], {"get-it": {}, "class": {}}))
    assert calls_in(pieces) == [("get-it", {"a": 1}), ("class", {"a": 2})]


_F: dict[str, Any] = {"f": {"properties": {"a": {"type": "integer"}}}}
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
    "values with tags": ("qwen3_coder", 2000, lambda n: ["<function=f><parameter=a>" + "</parameter>\n<" * n]),
    "and space behind them": ("qwen3_coder", 2000, lambda n: ["<function=f><parameter=b></parameter>", *" " * n]),
    "values without an end": ("glm45", 2000, lambda n: ["<tool_call>f<arg_key>a</arg_key><arg_value>1" * n]),
    "calls that are none": ("kimi_k2", 2000, lambda n: ["<|tool_calls_section_begin|><|tool_call_begin|>" * n]),
    "space behind a comma": ("hermes", 2000, lambda n: [_BEGUN, "1,", *" " * n]),
    "a call by its characters": ("hermes", 2000, lambda n: ['<tool_call>{"type": "', *"a" * n]),
}


@pytest.mark.parametrize(("format", "size", "parts"), COSTLY.values(), ids=COSTLY)
def test_each_character_is_read_a_few_times_at_most(format: str, size: int, parts: Callable[[int], list[str]]) -> None:
    assert growth(lambda n: read(format, parts(n), _F), size) < 9


@pytest.mark.parametrize("parts", [["<|python_start|>[f(" * 3], ["<|python_start|>[f(" * 3 + ")))"], [*"[f([a='x"]])
def test_invalid_python_call_is_text(parts: list[str]) -> None:
    assert "".join(str(piece) for piece in read("pythonic", parts, _F)) == "".join(parts)


@pytest.mark.parametrize(
    ("number", "is_one"),
    [
        *((number, True) for number in ("1" * 5000, "-10.25e-310", "1." + "0" * 500 + "e" + "9" * 9)),
        *((number, False) for number in ("0123", "0" * 9, "1.", "1e", "1e5.", "1-", "12x", "1.5.5")),
    ],
)
def test_number_of_any_length_is_one_number(number: str, is_one: bool) -> None:
    for parts in ([f"{_BEGUN}{number}}}}}</tool_call>"], [*f"{_BEGUN}{number}}}}}</tool_call>"]):
        said = "".join(piece.text for piece in read("hermes", parts, _F) if isinstance(piece, CallArguments))
        assert (said == f'{{"a": {number}}}') is is_one


@pytest.mark.parametrize(
    ("format", "raw"),
    [
        ("pythonic", "[f(a='\\ud800')]"),
        ("hermes", '<tool_call>{"arguments": "{\\"a\\": \\"\\ud800\\"}", "name": "f"}</tool_call>'),
    ],
)
def test_arguments_contain_no_lone_surrogates(format: str, raw: str) -> None:
    pieces = read(format, [raw], _F)
    assert "".join(str(piece) for piece in pieces) == raw  # kept as text
    assert not any(isinstance(piece, CallArguments) for piece in pieces)


@pytest.mark.parametrize("about", [{"type": 5}, {"type": [5]}, {"anyOf": None}, {"oneOf": 3, "type": "integer"}, 7])
def test_schema_can_contain_anything(about: object) -> None:
    raw = "<function=f><parameter=a>1</parameter></function>"
    said = [piece.text for piece in read("qwen3_coder", [raw], {"f": {"properties": {"a": about}}})
            if isinstance(piece, CallArguments)]  # fmt: skip
    assert json.loads("".join(said))["a"] in (1, "1")
