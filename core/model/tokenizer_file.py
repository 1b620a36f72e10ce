"""Tokenizer of a model directory: tokenizer.json, or a file of ranked tokens, which is converted in memory.

    tiktoken.model   one token per line; split pattern known for Kimi, special tokens in tokenizer_config.json
    tekken.json      Mistral's: one JSON object with tokens, split pattern and special tokens
    tokenizer.model  SentencePiece's, of kind BPE; Mistral's repositories add a version, such as tokenizer.model.v3

With a ranked vocabulary, the two neighbours whose joint token has the lowest rank are joined first, as in the tiktoken
library. Files beside tokenizer.json add tokens or mark some as special.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from core.model.sentence_piece import is_sentence_piece, ranked_merges, read_sentence_piece, special_pieces
from core.model.settings import read_object
from core.types.errors import SpecError

TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
TEKKEN = "tekken.json"
_TIKTOKEN = "tiktoken.model"
_PIECES = "tokenizer.model"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
# Split patterns by tokenizer_class; tiktoken.model itself has none.
_PATTERNS = {
    "TikTokenTokenizer": rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # Kimi
}
# Special tokens of tekken.json files that list none, by id.
_FIRST_TEKKEN = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_TEKKEN_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def open_tokenizer(model_dir: Path) -> Tokenizer:
    """Return the tokenizer as transformers builds it. Raises SpecError.

    Tokens of `added_tokens_decoder`, or of the older added_tokens.json, take precedence over those of tokenizer.json.
    Named tokens such as eos_token are special, even if tokenizer.json has an ordinary word of that text. A named token
    that is not in the vocabulary is left out: the model has no row for it.
    """
    path = check_tokenizer(model_dir)
    tokenizer = _load(path)
    if path.name in (_TIKTOKEN, TEKKEN):
        return tokenizer
    config, named = special_tokens(model_dir)
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
    path = check_tokenizer(model_dir)
    usual = _TEKKEN_NAMES if path.name == TEKKEN else special_pieces(path) if path.name.startswith(_PIECES) else {}
    listed = {**usual, **read_object(model_dir / "special_tokens_map.json", missing_ok=True), **config}
    texts = {name: _text(value) for name, value in listed.items() if name.endswith("_token")}
    return config, {name: text for name, text in texts.items() if text is not None}


def _declared(config: Mapping[str, Any], older: Mapping[str, Any], named: set[str]) -> Iterator[tuple[int, AddedToken]]:
    """Yield ids and added tokens, sorted by id. older: ids by text, from added_tokens.json."""
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


def check_tokenizer(model_dir: Path) -> Path:
    """Return the tokenizer's file, without reading its vocabulary. Raises SpecError if there is none."""
    files = [model_dir / name for name in _READERS] + sorted(model_dir.glob(f"{_PIECES}.v*"), reverse=True)
    path = next((file for file in files if file.is_file() and _is_readable(file)), None)
    if path is None or (path.name == _TIKTOKEN and _pattern(path) is None):
        raise SpecError(f"{model_dir}: no {TOKENIZER}; {_fix(model_dir)}")
    return path


def _is_readable(file: Path) -> bool:
    try:
        return not file.name.startswith(_PIECES) or is_sentence_piece(file)
    except OSError as error:
        raise SpecError(f"{file}: {error.strerror}") from None


def _load(path: Path) -> Tokenizer:
    """Return the tokenizer of a file that check_tokenizer found. Raises SpecError.

    Converting a ranked vocabulary of 160,000 tokens takes about two seconds.
    """
    try:
        tokenizer = _READERS[_PIECES if path.name.startswith(_PIECES) else path.name](path)
    except (KeyboardInterrupt, SystemExit, SpecError):
        raise
    except BaseException as error:  # the library raises plain Exception for a bad file, or a Rust panic
        raise SpecError(f"{path}: not readable as a tokenizer: {error}") from error
    if not tokenizer.get_vocab_size():
        raise SpecError(f"{path}: its vocabulary is empty; download it again")
    tokenizer.no_truncation()  # some files still carry the settings of a training run
    tokenizer.no_padding()
    return tokenizer


def tekken_format(path: Path) -> tuple[int, Collection[str]]:
    """Return the version of the instruct format of a tekken.json, and its special tokens. Raises SpecError."""
    file = read_object(path)
    try:
        return int(file["config"]["version"].removeprefix("v").partition("m")[0]), _tekken_added(file).keys()
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise SpecError(f"{path}: not readable as a tokenizer: {error!r}") from error


def _tiktoken(path: Path) -> Tokenizer:
    pattern = _pattern(path)
    assert pattern
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    ranks = {b64decode(token): int(rank) for token, rank in lines}
    first = max(ranks.values()) + 1
    config = read_object(path.with_name("config.json"), missing_ok=True)
    end = (config.get("text_config") or config).get("vocab_size", 0)
    listed = read_object(path.with_name("tokenizer_config.json")).get("added_tokens_decoder") or {}
    named = {int(token_id): token["content"] for token_id, token in listed.items()}
    ids = range(first, end or max(named, default=-1) + 1)
    added = {named.get(i, f"<|reserved_token_{i}|>"): i for i in ids}
    return _ranked(ranks, pattern, added, shown=[one["content"] for one in listed.values() if not one.get("special")])


def _pattern(path: Path) -> str | None:
    name = read_object(path.with_name("tokenizer_config.json"), missing_ok=True).get("tokenizer_class")
    return _PATTERNS.get(str(name))


def _tekken(path: Path) -> Tokenizer:
    file = read_object(path)
    config, added = file["config"], _tekken_added(file)
    first = config["default_num_special_tokens"]
    tokens = file["vocab"][: config["default_vocab_size"] - first]
    ranks = {b64decode(token["token_bytes"]): token["rank"] + first for token in tokens}
    tokenizer = _ranked(ranks, config["pattern"], added)
    bos = _TEKKEN_NAMES["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, added[bos])])
    return tokenizer


def _tekken_added(file: Mapping[str, Any]) -> dict[str, int]:
    listed = file.get("special_tokens")
    named = dict(enumerate(_FIRST_TEKKEN)) if listed is None else {one["rank"]: one["token_str"] for one in listed}
    ids = range(file["config"]["default_num_special_tokens"])
    return {named.get(i, f"<SPECIAL_{i}>"): i for i in ids}


def _ranked(
    ids: Mapping[bytes, int], pattern: str, added: Mapping[str, int], *, shown: Collection[str] = ()
) -> Tokenizer:
    """Return a byte-level BPE tokenizer. ids: the id of each token's bytes, in order of rank. added: ids of tokens that
    are matched as written, before BPE; special unless in `shown`."""
    vocab = {_spelt(token): token_id for token, token_id in ids.items()}
    if clash := vocab.keys() & added.keys():
        raise ValueError(f"a token and an added token have the same text: {min(clash)!r}")
    merges = ranked_merges(vocab, vocab.items())
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, **added}, merges=merges, ignore_merges=True))
    split_to_bytes(tokenizer, [pattern])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in added if token not in shown])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in shown if token in added])
    return tokenizer


def split_to_bytes(tokenizer: Tokenizer, patterns: Sequence[str]) -> None:
    """Make a tokenizer byte-level, and split its words by each of these regular expressions in turn."""
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()


def _spelt(token: bytes) -> str:
    return "".join(map(_CHARACTERS.__getitem__, token))


def _characters() -> list[str]:
    """Return GPT-2's table: a printable Latin-1 byte is its own character, other bytes are numbered from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_CHARACTERS = _characters()
BYTE_OF = {character: byte for byte, character in enumerate(_CHARACTERS)}


def _fix(model_dir: Path) -> str:
    """Return instructions for writing tokenizer.json from the tokenizer in the directory."""
    tiktoken = next((file.name for pattern in (_TIKTOKEN, "*.tiktoken") for file in model_dir.glob(pattern)), None)
    if tiktoken:
        return (
            f"{tiktoken} does not contain its split pattern; take `pat_str` and the special tokens from the model's "
            "tokenization_*.py and convert it (`pip install transformers tiktoken`): from transformers."
            f"convert_slow_tokenizer import TikTokenConverter; TikTokenConverter('DIR/{tiktoken}', pattern=PAT_STR, "
            f"extra_special_tokens=TOKENS).converted().save('DIR/{TOKENIZER}')"
        )
    return (
        "write one (`pip install transformers sentencepiece protobuf`): from transformers import AutoTokenizer; "
        "AutoTokenizer.from_pretrained('DIR').save_pretrained('DIR')"
    )


# In order of precedence.
_READERS: Mapping[str, Callable[[Path], Tokenizer]] = {
    TOKENIZER: lambda path: Tokenizer.from_file(str(path)),
    _TIKTOKEN: _tiktoken,
    TEKKEN: _tekken,
    _PIECES: lambda path: read_sentence_piece(path, read_object(path.with_name(_CONFIG), missing_ok=True)),
}
