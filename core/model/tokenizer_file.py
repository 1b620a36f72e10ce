"""Tokenizer of a model directory: tokenizer.json, with the tokens that the files beside it add or mark as special."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from core.model.json_file import read_object
from core.types.errors import SpecError

_CONFIG = "tokenizer_config.json"


def open_tokenizer(model_dir: Path) -> Tokenizer:
    """Return the tokenizer as transformers builds it. Raises SpecError.

    Tokens of `added_tokens_decoder`, or of the older added_tokens.json, take precedence over those of tokenizer.json.
    Named tokens such as eos_token are special, even if tokenizer.json has an ordinary word of that text. A text that is
    not in the vocabulary is left out: the model has no row for it.
    """
    tokenizer, (config, named) = _load(model_dir / "tokenizer.json"), special_tokens(model_dir)
    try:
        older = read_object(model_dir / "added_tokens.json", missing_ok=True)
        declared = [*_declared(config, older, {*named.values()})]
        before = [*tokenizer.get_added_tokens_decoder().values()]
        same, texts = {repr(token) for token in before}, {token.content for token in before}
        tokenizer.add_tokens([token for _, token in declared if repr(token) not in same])
        added = tokenizer.get_added_tokens_decoder().values()
        special = {text for text in named.values() if not any(one.content == text and one.special for one in added)}
        special |= {*_listed(config)} - {one.content for one in added}
        tokenizer.add_special_tokens([text for text in sorted(special) if tokenizer.token_to_id(text) is not None])
    except (TypeError, ValueError, AttributeError) as error:
        raise SpecError(f"{model_dir / _CONFIG}: its added tokens are not readable: {error}") from error
    for i, token in declared:
        if token.content not in texts and (actual := tokenizer.token_to_id(token.content)) != i:
            raise SpecError(
                f"{model_dir / _CONFIG}: token {token.content} has id {i}, where tokenizer.json leads to {actual}; "
                "download both files again"
            )
    return tokenizer


def special_tokens(model_dir: Path) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Return tokenizer_config.json, and the text of bos_token, eos_token … by name. Raises SpecError."""
    config = read_object(model_dir / _CONFIG, missing_ok=True)
    listed = {**read_object(model_dir / "special_tokens_map.json", missing_ok=True), **config}
    texts = {name: _text(value) for name, value in listed.items() if name.endswith("_token")}
    return config, {name: text for name, text in texts.items() if text is not None}


def _load(path: Path) -> Tokenizer:
    if not path.is_file():
        raise SpecError(f"{path.parent}: has no tokenizer.json, so text cannot be tokenized")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises plain Exception for a bad file, or a Rust panic
        raise SpecError(f"{path}: not readable as a tokenizer: {error}") from error
    if not tokenizer.get_vocab_size():
        raise SpecError(f"{path}: its vocabulary is empty; download it again")
    tokenizer.no_truncation()  # some files still carry the settings of a training run
    tokenizer.no_padding()
    return tokenizer


def _declared(config: Mapping[str, Any], older: Mapping[str, Any], named: set[str]) -> Iterator[tuple[int, AddedToken]]:
    """Yield ids and added tokens by id. older: contents of added_tokens.json, ids by text."""
    if decoder := config.get("added_tokens_decoder"):
        for i, token in sorted((int(i), token) for i, token in decoder.items()):
            yield i, AddedToken(**{key: value for key, value in token.items() if key != "__type"})
        return
    for i, text in sorted((int(i), text) for text, i in older.items()):
        yield i, AddedToken(text, special=text in named, normalized=text not in named)


def _listed(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield special tokens without a name."""
    for key in ("additional_special_tokens", "extra_special_tokens"):
        given = config.get(key) or ()
        yield from (text for value in (given.values() if isinstance(given, dict) else given) if (text := _text(value)))


def _text(value: Any) -> str | None:
    """Return the text of a token that a file stores as a string or as an object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
