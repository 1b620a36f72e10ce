"""The model's own tokenizer: text to token ids, and each token id back to the bytes that it stands for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from core.types.errors import SpecError
from frontend.text.token_bytes import TokenBytes

# A text is worked on by the thread that asks, not by a pool of the library's own beside those (TextThreads).
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """Reads a model directory: tokenizer.json, tokenizer_config.json, generation_config.json, config.json.

    Only reads after construction, so any thread may use it; `encode` lets other threads run meanwhile.
    Raises SpecError when the directory has no tokenizer, or one whose tokens have no bytes of their own.
    """

    def __init__(self, model_dir: Path) -> None:
        self._fast = _load(model_dir / "tokenizer.json")
        self._bytes = TokenBytes.of(self._fast)
        # What a token adds to a text of whole characters, where that is whole characters again; else None, and for
        # special tokens. Each is looked for once.
        self.whole_text = cache(self._find_whole_text)
        config = _read_json(model_dir / "tokenizer_config.json")
        self.special_tokens = _special_tokens(config, _read_json(model_dir / "special_tokens_map.json"))
        added = self._fast.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.eos_token_ids = self._find_eos(model_dir)
        # An explicit add_bos_token overrides tokenizer.json's post-processor, as in transformers 4 and llama.cpp.
        self._post_process = "add_bos_token" not in config
        self._prefix = self._ids_of("bos_token") if config.get("add_bos_token") else []
        self._suffix = self._ids_of("eos_token") if config.get("add_eos_token") else []
        vocabulary = self._fast.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.longest_token = max(len(token) for token in vocabulary)  # characters

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; special tokens written in it count. add_special_tokens: BOS where the model wants it."""
        # The library's `encode` of one text holds the interpreter's lock until its end, that of a batch does not.
        if not add_special_tokens:
            return list(self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        [encoding] = self._fast.encode_batch_fast([text], add_special_tokens=self._post_process)
        return [*self._prefix, *encoding.ids, *self._suffix]

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a run of tokens that continues other text, so that a leading space stays.

        Bytes that are no UTF-8 become U+FFFD, one for each maximal part of a character.
        """
        skipped = self._special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in token_ids if i not in skipped).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What this token adds to the text, as UTF-8; often less than a character. Empty for an id without a token."""
        return self._bytes.of_id(token_id)

    def token_text(self, token_id: int) -> str:
        """A token's text as the OpenAI API prints it: bytes that are no UTF-8 by themselves are written \\xNN."""
        return self.token_bytes(token_id).decode(errors="backslashreplace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def ids_of(self, tokens: Iterable[str]) -> frozenset[int]:
        """Of those of them that are tokens."""
        return frozenset(i for token in tokens if (i := self._fast.token_to_id(token)) is not None)

    def _ids_of(self, name: str) -> list[int]:
        token_id = self._fast.token_to_id(self.special_tokens.get(name, ""))
        return [] if token_id is None else [token_id]

    def _find_whole_text(self, token_id: int) -> str | None:
        if not self.is_special(token_id):
            with suppress(UnicodeDecodeError):
                return self.token_bytes(token_id).decode()
        return None

    def _find_eos(self, model_dir: Path) -> frozenset[int]:
        """Every id that ends a sequence: the tokenizer's own, and more in generation_config.json, as in Llama 3."""
        listed = _read_json(model_dir / "generation_config.json").get("eos_token_id")
        if listed is None:
            listed = _read_json(model_dir / "config.json").get("eos_token_id")
        ids = [] if listed is None else listed if isinstance(listed, list) else [listed]
        return frozenset(ids) | frozenset(self._ids_of("eos_token"))


def _load(path: Path) -> FastTokenizer:
    if not path.is_file():
        raise SpecError(f"{path.parent}: has no tokenizer.json, so text cannot be turned into tokens")
    try:
        fast = FastTokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception, for a bad file and for a bad field alike
        raise SpecError(f"{path}: not readable as a tokenizer: {error}") from error
    fast.no_truncation()  # some files still carry the settings of a training run
    fast.no_padding()
    return fast


def _special_tokens(config: dict[str, Any], fallback: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, unk_token … with their text; a file may write one as a string or as an object."""
    tokens: dict[str, str] = {}
    for name, value in {**fallback, **config}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, or an empty one where there is no such file. Raises SpecError."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SpecError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise SpecError(f"{path}: must hold a JSON object")
    return content
