"""Random walks over SmolLM2's vocabulary within the mask: every completed answer is valid."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from core.grammar.compiler import CompiledGrammar, GrammarCompiler
from core.types.constraints import Grammar, GrammarKind
from frontend.text.tokenizer import Tokenizer
from tests.support.generated_schemas import schemas
from tests.support.grids import quick

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
