"""SentencePiece vocabularies of kind BPE: the file tokenizer.model, and a tokenizer of pieces with scores.

The format of the file is sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from core.types.errors import SpecError

Prefix = Literal["always", "first", "never"]

# Fields of the file, by number.
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_MERGED = (_NORMAL, _USER_DEFINED, _UNUSED)  # kinds; bytes and special pieces are never joined from text
# Fields of the trainer, with their defaults.
_MODEL, _BPE, _IS_SUFFIX = 3, 2, 24
_SPECIAL = {"unk_token": (40, 0, 45, "<unk>"), "bos_token": (41, 1, 46, "<s>"), "eos_token": (42, 2, 47, "</s>")}
_INSTEAD = "write tokenizer.json with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
_CHARSMAP, _ADDS_PREFIX, _DROPS_SPACES, _ESCAPES_SPACES = 2, 3, 4, 5


def is_sentence_piece(path: Path) -> bool:
    """Return whether a file is in this format. tokenizer.model may be a file of tiktoken, which is text."""
    with path.open("rb") as file:
        return file.read(1) == bytes([_PIECE << 3 | 2])


def read_sentence_piece(path: Path, config: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a file, which begins prompts with bos_token. Raises SpecError if it is not BPE.

    config: tokenizer_config.json. Its `legacy` is true by default: a space begins the text after each special token.
    """
    pieces, trainer, normalizer = _read(path)
    if trainer.get(_MODEL) != _BPE or trainer.get(_IS_SUFFIX) or normalizer.get(_CHARSMAP):
        raise SpecError(f"{path}: only models of kind BPE without a character map are read; {_INSTEAD}")
    if normalizer.get(_DROPS_SPACES, 1) or not normalizer.get(_ESCAPES_SPACES, 1):
        raise SpecError(f"{path}: a model that removes or keeps spaces in its own way is not read; {_INSTEAD}")
    adds_prefix = config.get("add_prefix_space")
    adds_prefix = normalizer.get(_ADDS_PREFIX, 1) if adds_prefix is None else adds_prefix
    texts = [text for text, _, _ in pieces]
    named = _special(texts, trainer)
    tokenizer = merged_by_score(
        texts,
        [score if kind in _MERGED else None for _, score, kind in pieces],
        unknown=named.get("unk_token"),
        prefix="never" if not adds_prefix else "first" if config.get("legacy") is False else "always",
    )
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        add([AddedToken(text, normalized=False, special=kind == _CONTROL) for text, _, own in pieces if own == kind])
    if bos := named.get("bos_token"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, texts.index(bos))]
        )
    return tokenizer


def special_pieces(path: Path) -> dict[str, str]:
    """Return the texts of unk_token, bos_token and eos_token, as far as the file has them."""
    pieces, trainer, _ = _read(path)
    return _special([text for text, _, _ in pieces], trainer)


def _special(texts: Sequence[str], trainer: _Message) -> dict[str, str]:
    known, found = set(texts), {}
    for name, (id_field, usual_id, text_field, usual_text) in _SPECIAL.items():
        token_id, text = trainer.get(id_field, usual_id), trainer.get(text_field)
        written = text.decode() if text else usual_text
        if token_id < 1 << 31 and written in known:  # -1: none
            found[name] = written
    return found


def merged_by_score(
    tokens: Sequence[str], scores: Sequence[float | None], *, unknown: str | None, prefix: Prefix = "always"
) -> Tokenizer:
    """Return a tokenizer that joins the neighbours whose joint token has the highest score, with byte fallback.

    scores: None for tokens that are never joined. prefix: texts that begin with a space: all between special tokens,
    the first one, or none.
    """
    vocab = {token: index for index, token in enumerate(tokens)}
    ranks = [(token, -score) for token, score in zip(tokens, scores, strict=True) if score is not None]
    model = models.BPE(
        vocab=vocab, merges=ranked_merges(vocab, ranks), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    spaces, decoded = normalizers.Replace(" ", "▁"), [decoders.Replace("▁", " "), decoders.ByteFallback()]
    if prefix == "always":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    elif prefix == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = spaces
    ends = [] if prefix == "never" else [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([*decoded, decoders.Fuse(), *ends])
    return tokenizer


def ranked_merges(ids: Mapping[str, int], ranks: Iterable[tuple[str, float]]) -> list[tuple[str, str]]:
    """Return the merges in order of rank: each split of a token into two others, with the token's rank."""
    merges = [
        (rank, ids[left], ids[right], left, right)
        for token, rank in ranks
        for cut in range(1, len(token))
        if (left := token[:cut]) in ids and (right := token[cut:]) in ids
    ]
    return [(left, right) for *_, left, right in sorted(merges)]


class _Message(dict[int, Any]):
    """Fields of a message by number; the last value of each."""

    def __init__(self, data: bytes) -> None:
        super().__init__(_fields(data))


def _read(path: Path) -> tuple[list[tuple[str, float, int]], _Message, _Message]:
    """Return the pieces with their scores and kinds, and the settings of the trainer and of the normalizer."""
    pieces, others = [], dict[int, Any]()
    for number, value in _fields(path.read_bytes()):
        if number == _PIECE:
            piece = _Message(value)
            (score,) = struct.unpack("<f", piece.get(_SCORE, bytes(4)))
            pieces.append((piece[_TEXT].decode(), score, piece.get(_KIND, 1)))
        else:
            others[number] = value
    return pieces, _Message(others.get(_TRAINER, b"")), _Message(others.get(_NORMALIZER, b""))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protobuf message: numbers as int, others as bytes. Raises ValueError if it is truncated."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"a field of kind {kind} is unknown")
        size, at = _varint(data, at) if kind == 2 else (8 if kind == 1 else 4, at)
        if at + size > len(data):
            raise ValueError("it ends inside a field; download it again")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
    raise ValueError("it ends inside a number; download it again")
