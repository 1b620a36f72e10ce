"""Texts that a compiled grammar accepts, over the vocabulary of single characters or any other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from core.grammar.compiler import CompiledGrammar, GrammarCompiler
from tests.support.character_tokenizer import CHARACTERS, END, save_tokenizer


def character_ids(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def make_compiler(directory: Path, *, vocab_size: int = 128) -> GrammarCompiler:
    """Write the tokenizer of single characters and return a compiler of grammars over it."""
    save_tokenizer(directory)
    return GrammarCompiler(directory, vocab_size=vocab_size)


def is_allowed(words: Sequence[int], token: int) -> bool:
    return bool(int(words[token >> 5]) >> (token & 31) & 1)


def accepts(compiled: CompiledGrammar, ids: Sequence[int], end: int = END) -> bool:
    """Return whether a grammar accepts these tokens as a whole answer."""
    mask, ids = compiled.mask([end]), [*ids, end]
    return all(is_allowed(mask.allowed(ids[:number], 0), token) for number, token in enumerate(ids))
