"""Bytes of each token, derived from the decoder in tokenizer.json.

A decoder turns a whole list of tokens into text, but streaming needs the bytes of one token regardless of its
neighbours. Two families of decoders allow that exactly, and every supported model uses one of them:

    ByteLevel                          GPT-2's table: each character of a token is one byte    (Llama 3, Qwen, SmolLM2)
    Replace ▁, ByteFallback, Fuse …    tokens are text, but <0xNN> is one byte                 (Llama 2, Mistral, Gemma)

The second family may strip the space before the very first token; a completion continues a prompt, so the space is
kept here. That family also replaces a whole run of <0xNN> tokens if any byte is invalid UTF-8; this module, like
sentencepiece, replaces only the invalid bytes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from core.model.tokenizer_formats import BYTE_OF
from core.types.errors import SpecError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass
class TokenBytes:
    """Lazily filled table of token bytes. Filling is idempotent, so threads may share it."""

    tokenizer: Tokenizer
    is_byte_level: bool = False
    has_byte_fallback: bool = False
    replacements: list[tuple[str, str]] = field(default_factory=list)
    _table: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenBytes:
        """Read the tokenizer's decoder. Raises SpecError if its tokens have no bytes of their own."""
        if tokenizer.decoder is None:
            raise SpecError("tokenizer.json has no decoder, so tokens cannot be converted to text")
        table = cls(tokenizer)
        for step in _steps(json.loads(tokenizer.decoder.__getstate__())):
            table._add(step)
        return table

    def of_id(self, token_id: int) -> bytes:
        found = self._table.get(token_id)
        if found is None:
            token = self.tokenizer.id_to_token(token_id)
            found = self._table[token_id] = b"" if token is None else self._of_token(token)
        return found

    def _add(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self.is_byte_level = True
            case {"type": "ByteFallback"}:
                self.has_byte_fallback = True
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
                self.replacements.append((pattern, content))
            case {"type": "Metaspace", "replacement": pattern}:
                self.replacements.append((pattern, " "))
            case {"type": "Fuse"} | {"type": "Strip", "content": " ", "start": 0 | 1, "stop": 0}:
                pass  # joins tokens, or strips the very first space
            case _:
                raise SpecError(f"tokenizer.json: unsupported decoder step {step}; use ByteLevel or ByteFallback")

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
