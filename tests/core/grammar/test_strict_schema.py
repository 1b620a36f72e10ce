"""Schemas: rewritten ones reject invalid instances that llguidance alone accepts; endless ones are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from core.grammar.compiler import CompiledGrammar, GrammarCompiler
from core.grammar.strict_schema import is_endless
from core.types.errors import RequestError
from core.types.request import Grammar, GrammarKind
from tests.support.growth import growth
from tests.support.masks import accepts, character_ids, make_compiler

_FOO: dict[str, Any] = {"type": "object", "properties": {"foo": {"type": "integer"}}}
_KNOWN_TO_US = ("time", "date-time", "hostname")  # jsonschema does not check leap seconds and labels
_CALL = 'start: "<" answer\nanswer: %json '


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return make_compiler(tmp_path_factory.mktemp("model"))


def _compile(compiler: GrammarCompiler, schema: Any, kind: GrammarKind = GrammarKind.JSON_SCHEMA) -> CompiledGrammar:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return compiler.compile(Grammar(kind=kind, text=text))


@pytest.mark.filterwarnings("ignore:Possible (nested set|set intersection|set symmetric)")  # from Python's re
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (_FOO, ['{"foo": 1}', '{"bar": "x"}', r'{"b\n": 1}'], [r'{"\u0066oo": "x"}', r'{"foo": 1, "\u0066oo": "x"}']),
        ({"patternProperties": {"^a": {"type": "null"}}, "additionalProperties": {"type": "boolean"}}, ['{"ab": null}',
         '{"b": true}'], [r'{"\u0061b": true}']),
        ({"format": "date"}, ['"2024-02-29"', '"2000-02-29"', '"1999-12-31"', "7"], ['"2023-02-29"', '"1900-02-29"']),
        ({"type": "string", "format": "date"}, ['"0001-01-01"'], ['"0000-01-01"']),
        ({"format": "time"}, ['"23:59:59Z"'], ['"23:58:60Z"', '"10:00:60+01:00"']),
        ({"format": "date-time", "allOf": [{"pattern": "Z$"}]}, ['"2024-02-29T01:02:03Z"'], ['"2023-02-29T01:02:03Z"',
         '"2024-02-29T01:02:60Z"', '"2024-02-29T01:02:03+01:00"']),
        ({"type": "string", "format": "hostname"}, ['"a"', '"b-c.d--e.example"', '"xn-a.ab.x-n--a"'], ['"xn--x"',
         '"a.XN--aa---o47jg78q"', '"a..b"']),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.1", "0.5", "0.00000001"], ["0", "0.0", "-0.1", "0.6"]),
        ({"allOf": [{"exclusiveMinimum": 2}, {"exclusiveMaximum": 2.25}]}, ["2.1", "2.24"], ["2", "2.0", "2.25"]),
        ({"minimum": -2.5, "exclusiveMaximum": -2, "maximum": -2}, ["-2.5", "-2.1"], ["-2", "-2.0", "-2.6"]),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, ["-0.1", "-0.5"], ["-0", "0", "-0.6"]),
        ({"exclusiveMinimum": 10**9, "maximum": 10**9 + 0.5}, ["1000000000.1"], ["1000000000"]),
        ({"type": "integer", "exclusiveMinimum": 2, "maximum": 3.5}, ["3"], ["2", "4"]),
        ({"type": "string", "pattern": "^[[a]b]$"}, ['"ab]"', '"[b]"'], ['"a"', '"b"']),
        ({"type": "string", "pattern": "^[a&&b]$"}, ['"a"', '"&"'], ['"c"']),
        ({"type": "string", "pattern": r"^[\]&&~~]$"}, [r'"]"', '"&"', '"~"'], ['"]~"']),
        ({"type": "string", "pattern": "^[]a]$|^[^]b]&&$"}, ['"a"', '"]"', '"c&&"'], ['"b&&"']),
        ({"patternProperties": {"^[[]$": {"type": "null"}}, "additionalProperties": False}, ['{"[": null}'],
         ['{"x": 1}']),
    ],
)  # fmt: skip
def test_invalid_instances_are_rejected(
    compiler: GrammarCompiler, schema: Any, right: list[str], wrong: list[str]
) -> None:
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    compiled = _compile(compiler, schema)
    beside = _compile(compiler, _CALL + json.dumps(schema), GrammarKind.LARK)
    for text, is_right in [*((text, True) for text in right), *((text, False) for text in wrong)]:
        assert validator.is_valid(json.loads(text)) is is_right or schema.get("format") in _KNOWN_TO_US, text
        assert accepts(compiled, character_ids(text)) is is_right, text
        assert accepts(beside, character_ids("<" + text)) is is_right, text


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "object", "minProperties": 2}, "minProperties: at most 1 is supported"),
        ({"type": "object", "required": ["a"], "minProperties": 3}, "minProperties: at most 2 is supported"),
        ({"type": "object", "properties": {"a": {"const": "\x07"}}}, "const: the only supported control characters"),
        ({"enum": ["a", ["\x7f"]]}, "enum: the only supported control characters"),
        ({"type": "string", "pattern": "[+--]"}, r"pattern: .*write \\-"),
        (
            {"oneOf": [{"type": "integer"}, {"type": "number"}], "x-guidance": {"coerce_one_of": True}},
            "oneOf constraints are not supported. Use anyOf$",
        ),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
        ({"type": "integer", "multipleOf": 999_983}, "multipleOf: values must have a common multiple of at most 16384"),
        ({"type": "number", "multipleOf": 9.99983}, "multipleOf"),
        ({"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]}, "multipleOf"),
        ({"type": "array", "prefixItems": [{"type": "integer", "multipleOf": 5003 + i} for i in range(99)]}, "multi"),
        ("true", "a schema must be an object"),
        ("[" * 60_000, "it is nested too deeply"),
        ('{"anyOf":[' * 3000 + "{}" + "]}" * 3000, "it is nested too deeply"),
    ],
)
def test_unenforceable_schema_is_rejected(compiler: GrammarCompiler, schema: Any, expected: str) -> None:
    with pytest.raises(RequestError, match=expected):
        _compile(compiler, schema)


def test_enforceable_schema_is_accepted(compiler: GrammarCompiler) -> None:
    counted = {"type": "object", "required": ["a"], "minProperties": 2, "additionalProperties": {"type": "null"}}
    assert accepts(
        _compile(compiler, {**counted, "properties": {"a": {"const": 1}}}), character_ids('{"a": 1, "b": null}')
    )
    for step in (0.01, 1_000_000, 7, 16_383, 0.00000025):
        assert accepts(_compile(compiler, {"type": "number", "multipleOf": step}), character_ids("0"))
    odd = {"type": "object", "properties": {"\x07": {"const": r"\u0007"}}, "description": "\x07"}
    assert accepts(_compile(compiler, odd), character_ids(r'{"\u0007": "\\u0007"}'))


def test_lenient_schema_ignores_unenforceable_keywords(compiler: GrammarCompiler) -> None:
    schema = {"enum": ["\x07"], "minProperties": 2, "oneOf": [{"type": "string"}]}
    assert accepts(_compile(compiler, schema, GrammarKind.LENIENT_JSON_SCHEMA), character_ids(r'"\u0007"'))
    steps = {"type": "integer", "multipleOf": 999_983}
    assert accepts(_compile(compiler, steps, GrammarKind.LENIENT_JSON_SCHEMA), character_ids("7"))
    assert not accepts(_compile(compiler, _FOO, GrammarKind.LENIENT_JSON_SCHEMA), character_ids(r'{"\u0066oo": "x"}'))


@pytest.mark.parametrize("kind", [GrammarKind.JSON_SCHEMA, GrammarKind.LENIENT_JSON_SCHEMA])
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        *(({"$ref": f"#/$defs/{name}", "$defs": {name: {"const": 1}}}, "1", "2")
          for name in ("Page[int]", "List<int>", "a b", "Größe", "50%", "a^b|c", "x.y-z~w")),
        ({"$ref": "#/$defs/Page%5Bint%5D", "$defs": {"Page[int]": {"const": 1}}}, "1", "2"),
        ({"type": "object", "required": None, "properties": {"a": {"type": "null", "pattern": None, "items": None}},
          "additionalProperties": False, "description": None}, '{"a": null}', '{"a": 1}'),
        ({"const": None}, "null", "1"),
        ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, '"ab"', '"abc"'),
        ({"type": "string", "pattern": r"\Aa\Z"}, '"a"', '"ab"'),
    ],
)  # fmt: skip
def test_schemas_of_generators_are_read(
    compiler: GrammarCompiler, kind: GrammarKind, schema: Any, right: str, wrong: str
) -> None:
    """Names of generic and non-ASCII types in references, null for omitted keywords, and Python's `\\Z`."""
    compiled = _compile(compiler, schema, kind)
    assert accepts(compiled, character_ids(right)) and not accepts(compiled, character_ids(wrong))


@pytest.mark.parametrize("additional", [False, {"type": "integer"}])
def test_properties_by_pattern_stay_allowed_without_the_pattern(compiler: GrammarCompiler, additional: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"type": "string", "pattern": "("}},
        "patternProperties": {"^S_": {"type": "string"}},
        "additionalProperties": additional,
    }
    compiled = _compile(compiler, schema, GrammarKind.LENIENT_JSON_SCHEMA)
    assert accepts(compiled, character_ids('{"S_x": "1"}'))


@pytest.mark.parametrize("pattern", ["([", "^{.*}$", r"^\cA$", "^[a--b]$", "^(?>a)$"])
def test_pattern_of_another_dialect_is_ignored_in_a_lenient_schema(compiler: GrammarCompiler, pattern: str) -> None:
    properties = {"a": {"type": "string", "pattern": pattern}, "b": {"type": "null"}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"]}
    lark = _CALL + json.dumps({**schema, "x-guidance": {"lenient": True}})
    for compiled, before in (
        (_compile(compiler, schema, GrammarKind.LENIENT_JSON_SCHEMA), ""),
        (_compile(compiler, lark, GrammarKind.LARK), "<"),
    ):
        for text, is_right in (('{"a": "x", "b": null}', True), ('{"a": "x", "b": 1}', False)):
            assert accepts(compiled, character_ids(before + text)) is is_right
    with pytest.raises(RequestError, match=r"pattern: |regex parse error"):
        _compile(compiler, schema)


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
