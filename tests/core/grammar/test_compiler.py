"""Masks of compiled grammars over single characters and SmolLM2's vocabulary, and rejected grammars."""

from __future__ import annotations

import json
import random
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from core.grammar.compiler import CompiledGrammar, GrammarCompiler
from core.grammar.mask import GrammarMask
from core.types.errors import RequestError
from core.types.request import MAX_GRAMMAR_BYTES, MAX_SCHEMA_BYTES, Grammar, GrammarKind
from frontend.text.tokenizer import Tokenizer
from tests.support.character_tokenizer import CHARACTERS, END, save_tokenizer
from tests.support.generated_schemas import schemas
from tests.support.grids import quick
from tests.support.masks import character_ids, is_allowed, make_compiler


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return make_compiler(tmp_path_factory.mktemp("model"))


def _mask(compiler: GrammarCompiler, kind: GrammarKind, text: str) -> GrammarMask:
    return compiler.compile(Grammar(kind=kind, text=text)).mask([END])


def _allowed(mask: GrammarMask, text: str) -> str:
    """Return the characters allowed after `text`; $ for the end."""
    words = mask.allowed([0, 0, *character_ids(text)], 2)
    ids = [i for i in range(len(words) * 32) if is_allowed(words, i)]
    return "".join(sorted("$" if i == END else CHARACTERS[i] for i in ids))


def test_mask_is_a_function_of_the_tokens(compiler: GrammarCompiler) -> None:
    kind, text = GrammarKind.REGEX, "a(b|cd)*"
    grown = _mask(compiler, kind, text)
    for prefix, following in (("", "a"), ("a", "$bc"), ("ab", "$bc"), ("abc", "d"), ("abcd", "$bc")):
        assert _allowed(grown, prefix) == following
        assert _allowed(_mask(compiler, kind, text), prefix) == following  # a new mask that reads all tokens at once
        assert _allowed(grown, prefix) == following  # a repeated call without a new token


def test_fork_is_independent(compiler: GrammarCompiler) -> None:
    mask = _mask(compiler, GrammarKind.REGEX, "a(b|cd)*")
    assert _allowed(mask, "a") == "$bc"
    fork = mask.fork()
    assert _allowed(mask, "ac") == "d"
    assert _allowed(fork, "ab") == "$bc"


def test_forced_token_is_the_only_one_in_the_mask(compiler: GrammarCompiler) -> None:
    mask = _mask(compiler, GrammarKind.REGEX, "a(bc|bd)e?")
    for prefix, follows in (("", "a"), ("a", "b"), ("ab", ""), ("abc", ""), ("abce", "$")):
        only = mask.only([0, 0, *character_ids(prefix)], 2)
        assert ("" if only is None else "$" if only == END else CHARACTERS[only]) == follows
        assert not follows or _allowed(mask, prefix) == follows
    for ends in ([], [END, 3], [END, END - 1], [3, 99]):  # the last token is not forced, in whichever words they are
        mask = compiler.compile(Grammar(kind=GrammarKind.REGEX, text="a")).mask(ends)
        assert mask.only(character_ids("a"), 0) is None
    wrong = _mask(compiler, GrammarKind.REGEX, "ab")
    assert wrong.only([CHARACTERS.index("x")], 0) is None and wrong.failure


def test_json_has_a_single_format(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"type": "null"}}, "required": ["a", "b"]}
    schema["additionalProperties"] = False
    text = json.dumps({"a": 2, "b": None})
    mask = _mask(compiler, GrammarKind.JSON_SCHEMA, json.dumps(schema))
    for length, character in enumerate(text):
        assert character in _allowed(mask, text[:length])
    assert _allowed(mask, text) == "$"
    assert _allowed(_mask(compiler, GrammarKind.JSON_SCHEMA, json.dumps(schema)), '{"a":') == " "


def test_choice_is_literal(compiler: GrammarCompiler) -> None:
    mask = compiler.compile(Grammar.of_choice(['a"|b', "a\\c"], "choice")).mask([END])
    assert _allowed(mask, "a") == '"\\'
    assert _allowed(mask, 'a"|b') == "$"


def test_forbidden_token_sets_the_failure(compiler: GrammarCompiler) -> None:
    mask = _mask(compiler, GrammarKind.REGEX, "ab")
    assert _allowed(mask, "x") == "" and "allows no further token" in mask.failure
    assert _allowed(mask, "x") == ""
    other = compiler.compile(Grammar(kind=GrammarKind.REGEX, text="ab")).mask([END])
    assert _allowed(other, "a") == "b" and not other.failure


def test_no_stop_token_means_nothing_fits(compiler: GrammarCompiler) -> None:
    mask = compiler.compile(Grammar(kind=GrammarKind.REGEX, text="ab")).mask([])
    assert _allowed(mask, "ab") == "" and mask.failure


_DEEP: dict[str, Any] = {"type": "string"}
for _ in range(400):
    _DEEP = {"type": "array", "items": _DEEP}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.REGEX, "[a"),
        (GrammarKind.REGEX, "(?=a)b"),
        (GrammarKind.REGEX, "(" * 5000),
        (GrammarKind.REGEX, ""),
        (GrammarKind.REGEX, "a" * (MAX_GRAMMAR_BYTES + 1)),
        (GrammarKind.LARK, "start: nothing"),
        (GrammarKind.LARK, 'root ::= ("a"'),
        (GrammarKind.LARK, "start: @other"),
        (GrammarKind.JSON_SCHEMA, "{"),
        (GrammarKind.JSON_SCHEMA, "7"),
        (GrammarKind.JSON_SCHEMA, '{"type": "strange"}'),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}'),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "file:///etc/passwd"}'),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "http://127.0.0.1:1/x"}'),
        (GrammarKind.JSON_SCHEMA, json.dumps(_DEEP)),
        (GrammarKind.JSON_SCHEMA, json.dumps({"const": "a" * MAX_SCHEMA_BYTES})),
    ],
)
def test_invalid_grammar_names_the_parameter(compiler: GrammarCompiler, kind: GrammarKind, text: str) -> None:
    with pytest.raises(RequestError) as rejected:
        compiler.compile(Grammar(kind=kind, text=text), param="field")
    assert rejected.value.param == "field"
    assert len(str(rejected.value)) < 400 and "\n" not in str(rejected.value)


def test_choices_share_a_cost_limit(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    times = count()
    monkeypatch.setattr("core.grammar.mask.time.thread_time", lambda: next(times) / 10)
    masks = [_mask(compiler, GrammarKind.REGEX, "a*")]
    masks += [masks[0].fork() for _ in range(9)]
    for mask in masks:  # each takes 0.1 s; the limit is half a second
        mask.allowed([], 0)
    assert [bool(mask.failure) for mask in masks] == [False] * 5 + [True] * 5
    assert "too long" in masks[-1].failure
    other = _mask(compiler, GrammarKind.REGEX, "a*")
    assert _allowed(other, "") == "$a"


def test_slow_compilation_is_rejected(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    times = count()
    monkeypatch.setattr("core.grammar.compiler.time.thread_time", lambda: next(times))
    with pytest.raises(RequestError, match="takes longer than"):
        compiler.compile(Grammar(kind=GrammarKind.REGEX, text="a"))


def test_lark_and_gbnf_are_distinguished(compiler: GrammarCompiler) -> None:
    for text in ('start: "a"', "\n" * 8000 + 'a: "a"\n  start : a', 'root ::= "a"'):
        assert _allowed(_mask(compiler, GrammarKind.LARK, text), "") == "a"


def test_unsupported_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        GrammarCompiler(tmp_path, vocab_size=8).compile(Grammar(kind=GrammarKind.REGEX, text="a"))


@pytest.mark.parametrize("number", [2**53, -(2**53), 10**30])
def test_integers_beyond_fp64_are_rejected(compiler: GrammarCompiler, number: int) -> None:
    """llguidance treats numbers as fp64: for 2^53 + 1 it would allow only 2^53."""
    schema = json.dumps({"type": "object", "properties": {"id": {"const": number}}})
    for kind, text in (
        (GrammarKind.JSON_SCHEMA, schema),
        (GrammarKind.LARK, f"start: answer\nanswer: %json {schema}"),
    ):
        with pytest.raises(RequestError, match="integers must be from -9007199254740991 to 9007199254740991; write"):
            compiler.compile(Grammar(kind=kind, text=text))
    compiler.compile(Grammar(kind=GrammarKind.LENIENT_JSON_SCHEMA, text=schema))  # ignores the value
    exact = 2**53 - 1 if number > 0 else 1 - 2**53
    for prefix, follows in ((str(exact)[:-1], str(exact)[-1]), (str(exact), "$")):
        assert _allowed(_mask(compiler, GrammarKind.JSON_SCHEMA, json.dumps({"const": exact})), prefix) == follows


def test_tokens_outside_the_model_are_never_allowed(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    compiler = GrammarCompiler(tmp_path, vocab_size=CHARACTERS.index("b"))
    mask = compiler.compile(Grammar(kind=GrammarKind.REGEX, text="ab")).mask([END])
    assert mask.only([CHARACTERS.index("a")], 0) is None
    assert _allowed(mask, "a") == "" and "nothing fits" in mask.failure


_MAX_TOKENS = 120


def test_matcher_is_rebuilt_when_its_cache_is_full(smollm2_dir: Path) -> None:
    """Strings of bounded length add a lexer state per character: about 600 tokens fill a matcher."""
    tokenizer = Tokenizer(smollm2_dir)
    compiler = GrammarCompiler(smollm2_dir, vocab_size=tokenizer.vocab_size)
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 3000 + i} for i in range(5)}}
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))
    tokens = tokenizer.encode(json.dumps({f"p{i}": "hello world. " * 100 for i in range(5)}))
    compiled = compiler.compile(grammar)
    masks = [compiled.mask([0]), compiler.compile(grammar).mask([0])]
    for length, token in enumerate(tokens):
        assert masks[0].only(tokens[:length], 0) in (None, token)
        words = masks[0].allowed(tokens[:length], 0)
        assert words[token // 32] >> token % 32 & 1, masks[0].failure
    masks.append(compiled.mask([0]))  # of another choice, which starts with the full matcher
    for mask in masks[1:]:
        assert mask.only([], 0) in (None, tokens[0])
        assert mask.allowed([], 0).any(), mask.failure


@pytest.mark.parametrize("number", quick([40, 100], [40]))
def test_every_answer_is_an_instance_of_its_schema(smollm2_dir: Path, number: int) -> None:
    tokenizer = Tokenizer(smollm2_dir)
    end = min(tokenizer.eos_token_ids)
    compiler = GrammarCompiler(smollm2_dir, vocab_size=tokenizer.vocab_size)
    generator, num_whole = random.Random(0), 0
    for schema in schemas(number):
        compiled = compiler.compile(Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema)))
        tokens = _walk(compiled, generator, end=end)
        if tokens[-1] == end:
            Draft202012Validator(schema).validate(json.loads(tokenizer.decode(tokens[:-1])))
            num_whole += 1
    assert num_whole >= {40: 10, 100: 40}[number], "too few walks reached the end"


def _walk(compiled: CompiledGrammar, generator: random.Random, *, end: int) -> list[int]:
    """Walk up to the end token or _MAX_TOKENS."""
    mask, tokens = compiled.mask([end]), list[int]()
    while len(tokens) < _MAX_TOKENS:
        known = mask.only(tokens, 0)
        bits = np.unpackbits(mask.allowed(tokens, 0).view(np.uint8), bitorder="little").nonzero()[0]
        assert len(bits), mask.failure
        assert known is None or bits.tolist() == [known]
        tokens.append(int(generator.choice(bits)) if end not in bits else end)
        if tokens[-1] == end:
            break
    return tokens
