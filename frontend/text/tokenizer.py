"""Tokenizer of a model: text to token ids, and token ids to bytes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

from core.model.config import token_ids
from core.model.json_file import read_object
from core.model.tokenizer_file import open_tokenizer, special_tokens
from frontend.text.token_bytes import TokenBytes

# Tokenize on the calling thread, which is already one of TextThreads, not on the library's own pool.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """Tokenizer of a model directory: tokenizer.json, tokenizer_config.json, generation_config.json, config.json.

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
            listed = read_object(model_dir / "config.json", missing_ok=True).get("eos_token_id")
        return frozenset(token_ids(listed)) | frozenset(self._ids_of("eos_token"))
