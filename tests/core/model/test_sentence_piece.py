"""SentencePiece's tokenizer.model, as Llama 2, Mistral and Gemma publish it.

3,000 random texts have the ids of the sentencepiece library with the files that mistral-common ships. Here the judge is
a naive implementation.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from core.model.sentence_piece import read_sentence_piece
from core.model.tokenizer_file import open_tokenizer
from core.types.errors import SpecError
from frontend.text.tokenizer import Tokenizer
from tests.core.model.test_gguf_tokenizer import naive_sentence_piece, sentence_piece_metadata
from tests.support.tiny_tokenizers import write_json

_NORMALIZER = {3: 1, 4: 0}  # adds a prefix, keeps all spaces
_TRAINER = {3: 2, 35: 1, 43: (1 << 64) - 1}  # BPE with byte fallback, without a padding token


def _varint(number: int) -> bytes:
    head = b""
    while number > 127:
        head += bytes([number & 127 | 128])
        number >>= 7
    return head + bytes([number])


def _message(fields: list[tuple[int, int | float | str | bytes]]) -> bytes:
    written = b""
    for field, value in fields:
        if isinstance(value, int):
            written += _varint(field << 3) + _varint(value)
        elif isinstance(value, float):
            written += _varint(field << 3 | 5) + struct.pack("<f", value)
        else:
            data = value.encode() if isinstance(value, str) else value
            written += _varint(field << 3 | 2) + _varint(len(data)) + data
    return written


def write(
    directory: Path,
    *,
    name: str = "tokenizer.model",
    trainer: dict[int, Any] | None = None,
    normalizer: dict[int, Any] | None = None,
) -> dict[str, Any]:
    """Write a model of the pieces of the GGUF tests, and return those."""
    metadata = sentence_piece_metadata()
    keys = ("tokens", "scores", "token_type")
    pieces = zip(*(metadata[f"tokenizer.ggml.{key}"] for key in keys), strict=True)
    parts: list[tuple[int, int | float | str | bytes]] = [(1, _message([*enumerate(piece, 1)])) for piece in pieces]
    parts += [
        (2, _message([*(_TRAINER | (trainer or {})).items()])),
        (3, _message([*(_NORMALIZER | (normalizer or {})).items()])),
    ]
    (directory / name).write_bytes(_message(parts))
    return metadata


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.model.v3"])
def test_ids_follow_the_scores(name: str, tmp_path: Path) -> None:
    metadata = write(tmp_path, name=name)
    tokenizer = open_tokenizer(tmp_path)
    for text in ("banana ban", "a  b", " nan日🙂", "", "abanana  cc"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == naive_sentence_piece(text, metadata), text
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a<tool>b</s>").tokens == ["<s>", "▁a", "<tool>", "▁b", "</s>"]
    ours = Tokenizer(tmp_path)
    assert ours.encode("ban")[0] == 1 and ours.eos_token_ids == {2}
    assert ours.is_special(2) and not ours.is_special(ours.vocab_size - 1)


def test_settings_of_the_directory(tmp_path: Path) -> None:
    write(tmp_path)
    for config, expected in (
        ({"legacy": False}, ["▁a", "<tool>", "b"]),
        ({"add_prefix_space": False}, ["a", "<tool>", "b"]),
        ({"legacy": None}, ["▁a", "<tool>", "▁b"]),
    ):
        write_json(tmp_path / "tokenizer_config.json", config)
        assert open_tokenizer(tmp_path).encode("a<tool>b", add_special_tokens=False).tokens == expected
    write_json(tmp_path / "tokenizer_config.json", {"add_bos_token": False, "eos_token": "<tool>"})
    ours = Tokenizer(tmp_path)
    assert ours.encode("ban")[0] != 1 and ours.eos_token_ids == ours.ids_of(["<tool>"])
    write_json(tmp_path / "added_tokens.json", {"<|im_end|>": ours.vocab_size})
    assert len(Tokenizer(tmp_path).encode("<|im_end|>")) == 1
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(SpecError, match=r"tokenizer\.json: not readable"):
        open_tokenizer(tmp_path)


def test_names_and_absence_of_special_tokens(tmp_path: Path) -> None:
    write(tmp_path, trainer={41: (1 << 64) - 1, 47: "<tool>"})
    ours = Tokenizer(tmp_path)
    assert ours.encode("ban")[0] != 1 and ours.eos_token_ids == ours.ids_of(["<tool>"])
    write(tmp_path, trainer={46: "<bos>"})  # not a piece
    assert Tokenizer(tmp_path).encode("ban")[0] != 1


def test_text_of_a_byte_piece_stays_text(tmp_path: Path) -> None:
    """Vocabularies may have all parts of the name of a byte."""
    pieces = [("<unk>", 0.0, 2), ("<0x0A>", 0.0, 6), ("▁", -1.0, 1), ("<0x0", -2.0, 1), ("A>", -3.0, 1)]
    pieces += [(character, -9.0, 1) for character in "<0xA>"] + [("<0", -4.0, 1), ("x0", -5.0, 1)]
    parts: list[tuple[int, Any]] = [(1, _message([*enumerate(piece, 1)])) for piece in pieces]
    parts += [
        (2, _message([*(_TRAINER | {41: (1 << 64) - 1, 42: (1 << 64) - 1}).items()])),
        (3, _message([*_NORMALIZER.items()])),
    ]
    (tmp_path / "tokenizer.model").write_bytes(_message(parts))
    tokens = read_sentence_piece(tmp_path / "tokenizer.model", {"add_prefix_space": False}).encode("<0x0A>").tokens
    assert tokens == ["<0x0", "A>"]


def test_unreadable_file_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(SpecError, match=r"tokenizer\.model: Permission denied"):
        open_tokenizer(tmp_path)


def refuse(*_: object) -> None:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"trainer": {3: 1}}, "only models of kind BPE without a character map are read"),
        ({"normalizer": {2: b"map"}}, "only models of kind BPE without a character map are read"),
        ({"normalizer": {4: 1}}, "a model that removes or keeps spaces in its own way is not read"),
    ],
)
def test_other_kinds_are_refused(settings: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    write(tmp_path, **settings)
    with pytest.raises(SpecError, match=complaint):
        read_sentence_piece(tmp_path / "tokenizer.model", {})


@pytest.mark.parametrize("end", [1, 100, -3])
def test_truncated_file_is_one_line(end: int, tmp_path: Path) -> None:
    write(tmp_path)
    whole = (tmp_path / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(whole[:end])
    with pytest.raises(SpecError, match=r"tokenizer\.model: ") as caught:
        open_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_text_of_tiktoken_is_another_format(tmp_path: Path) -> None:
    """Llama 3's original repository calls it tokenizer.model, too."""
    (tmp_path / "tokenizer.model").write_text("IQ== 0\n")
    with pytest.raises(SpecError, match=r"no tokenizer\.json"):
        open_tokenizer(tmp_path)
