"""Tokenizer of a model: text to token ids, and token ids to bytes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers

from core.model.config import token_ids
from core.model.settings import read_object
from core.model.tokenizer_file import BYTE_OF, open_tokenizer, special_tokens
from core.types.errors import SpecError

# Tokenize on the calling thread, which is already one of TextThreads, not on the library's own pool.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """Tokenizer of a model directory: its vocabulary, tokenizer_config.json, generation_config.json, config.json.

    Immutable and thread-safe; `encode` releases the GIL. Raises SpecError if the directory has no tokenizer, or one
    whose tokens have no bytes of their own.
    """

    def __init__(self, model_dir: Path, *, generation_dir: Path | None = None) -> None:
        """generation_dir: directory of generation_config.json; None: the model's."""
        self._fast = open_tokenizer(model_dir)
        self._bytes = TokenBytes.of(self._fast)
        # Text of a token whose bytes are whole UTF-8 characters; None for other tokens and for special ones. Cached.
        self.whole_text = cache(self._find_whole_text)
        config, self.special_tokens = special_tokens(model_dir)
        added = self._fast.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.eos_token_ids = self._find_eos(model_dir, generation_dir or model_dir)
        # An explicit add_bos_token overrides tokenizer.json's post-processor, as in transformers 4 and llama.cpp.
        self._post_process = "add_bos_token" not in config
        self._prefix = self._ids_of("bos_token") if config.get("add_bos_token") else []
        self._suffix = self._ids_of("eos_token") if config.get("add_eos_token") else []
        vocabulary = self._fast.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.longest_token = max(len(token) for token in vocabulary)  # characters

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, in which special tokens are recognized. add_special_tokens: add BOS if the model
        uses it."""
        # The library's single-text `encode` holds the GIL throughout; the batch version does not.
        if not add_special_tokens:
            return list(self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        [encoding] = self._fast.encode_batch_fast([text], add_special_tokens=self._post_process)
        return [*self._prefix, *encoding.ids, *self._suffix]

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Decode tokens that continue other text, so a leading space is kept.

        Invalid UTF-8 becomes U+FFFD, one for each maximal part of a character.
        """
        skipped = self._special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in token_ids if i not in skipped).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token, often less than a character. Empty for an unknown id."""
        return self._bytes.of_id(token_id)

    def token_text(self, token_id: int) -> str:
        """Return a token's text in the OpenAI API's form: bytes that are not valid UTF-8 are written \\xNN."""
        return self.token_bytes(token_id).decode(errors="backslashreplace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def has_special(self, token: str) -> bool:
        """Return whether the text is a special token, which decoding leaves out."""
        return not self.ids_of([token]).isdisjoint(self._special_ids)

    def special_ids_in(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of the special tokens that occur in the texts."""
        found = ((i, self.token_text(i)) for i in self._special_ids)
        known = {i: text for i, text in found if text}
        return frozenset(i for text in texts for i, token in known.items() if token in text)

    def ids_of(self, tokens: Iterable[str]) -> frozenset[int]:
        """Return the ids of those strings that are tokens."""
        return frozenset(i for token in tokens if (i := self._fast.token_to_id(token)) is not None)

    def _ids_of(self, name: str) -> list[int]:
        token_id = self._fast.token_to_id(self.special_tokens.get(name, ""))
        return [] if token_id is None else [token_id]

    def _find_whole_text(self, token_id: int) -> str | None:
        if not self.is_special(token_id):
            with suppress(UnicodeDecodeError):
                return self.token_bytes(token_id).decode()
        return None

    def _find_eos(self, model_dir: Path, generation_dir: Path) -> frozenset[int]:
        """Return the ids that end a sequence: the tokenizer's, and generation_config.json's, else config.json's."""
        listed = read_object(generation_dir / "generation_config.json", missing_ok=True).get("eos_token_id")
        if listed is None:
            config = read_object(model_dir / "config.json", missing_ok=True)
            text = config.get("text_config")
            text = text if isinstance(text, dict) else {}
            listed = text.get("eos_token_id") if config.get("eos_token_id") is None else config["eos_token_id"]
        return frozenset(token_ids(listed)) | frozenset(self._ids_of("eos_token"))


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass
class TokenBytes:
    """Lazily filled table of token bytes. Filling is idempotent, so threads may share it."""

    tokenizer: tokenizers.Tokenizer
    is_byte_level: bool = False
    has_byte_fallback: bool = False
    replacements: list[tuple[str, str]] = field(default_factory=list)
    _table: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> TokenBytes:
        """Read the tokenizer's decoder. Raises SpecError if its tokens have no bytes of their own."""
        if tokenizer.decoder is None:
            raise SpecError("tokenizer.json has no decoder, so tokens cannot be converted to text")
        table = cls(tokenizer)
        for step in _steps(json.loads(tokenizer.decoder.__getstate__())):
            match step:
                case {"type": "ByteLevel"}:
                    table.is_byte_level = True
                case {"type": "ByteFallback"}:
                    table.has_byte_fallback = True
                case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
                    table.replacements.append((pattern, content))
                case {"type": "Metaspace", "replacement": pattern}:
                    table.replacements.append((pattern, " "))
                case {"type": "Fuse"} | {"type": "Strip", "content": " ", "start": 0 | 1, "stop": 0}:
                    pass  # joins tokens, or strips the very first space
                case _:
                    raise SpecError(f"tokenizer.json: unsupported decoder step {step}; use ByteLevel or ByteFallback")
        return table

    def of_id(self, token_id: int) -> bytes:
        found = self._table.get(token_id)
        if found is None:
            token = self.tokenizer.id_to_token(token_id)
            found = self._table[token_id] = b"" if token is None else self._of_token(token)
        return found

    def _of_token(self, token: str) -> bytes:
        if self.has_byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        if self.is_byte_level and all(character in BYTE_OF for character in token):
            return bytes(BYTE_OF[character] for character in token)
        return token.encode()  # in a byte-level vocabulary this is an added token, stored as plain text


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]
