"""Tokenizer whose tokens are the printable ASCII characters, for models with random weights."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHARACTERS = [*(chr(code) for code in range(33, 127)), " "]  # by token id
END = len(CHARACTERS)  # a special token


def save_tokenizer(directory: Path) -> None:
    vocabulary = {character.replace(" ", "Ġ"): number for number, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(directory / "tokenizer.json"))
