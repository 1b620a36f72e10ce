"""Whatever a model prefers: tokens that are drawn blindly from SmolLM2's vocabulary, as far as the mask allows them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
from jsonschema import Draft202012Validator

from cluster.grammar.compiler import CompiledGrammar, GrammarCompiler
from cluster.words.grammar import Grammar, GrammarKind
from router.text.tokenizer import Tokenizer
from tests.generated_schemas import schemas

_MAX_TOKENS = 120


def test_every_answer_is_an_instance_of_its_schema(smollm2_dir: Path) -> None:
    tokenizer = Tokenizer(smollm2_dir)
    end = min(tokenizer.eos_token_ids)
    compiler = GrammarCompiler(smollm2_dir, vocab_size=tokenizer.vocab_size)
    generator, num_whole = random.Random(0), 0
    for schema in schemas(100):
        compiled = compiler.compile(Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema)))
        tokens = _walk(compiled, generator, end=end)
        if tokens[-1] == end:
            Draft202012Validator(schema).validate(json.loads(tokenizer.decode(tokens[:-1])))
            num_whole += 1
    assert num_whole >= 40, "hardly any has come to its end"


def _walk(compiled: CompiledGrammar, generator: random.Random, *, end: int) -> list[int]:
    """Up to the end, or _MAX_TOKENS."""
    mask, tokens = compiled.mask([end]), list[int]()
    while len(tokens) < _MAX_TOKENS:
        bits = np.unpackbits(mask.allowed(tokens, 0).view(np.uint8), bitorder="little").nonzero()[0]
        assert len(bits), mask.failure
        tokens.append(int(generator.choice(bits)) if end not in bits else end)
        if tokens[-1] == end:
            break
    return tokens
