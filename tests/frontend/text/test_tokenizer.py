"""Tokenizer: ids equal to transformers', bytes equal to the tokenizers library's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from core.types.errors import SpecError
from frontend.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import make_byte_fallback, make_byte_level, write_json

TEXTS = [
    "The capital of France",
    "你好世界 🎉",
    "é vs é",
    "tabs\tand\n\nlines",
    " lead",
    "<|im_start|>user\nhi<|im_end|>",
    "an added <think> so on",
    "\x00",
]


@pytest.fixture(scope="module")
def raw_byte_level(byte_level_dir: Path) -> FastTokenizer:
    return FastTokenizer.from_file(str(byte_level_dir / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(byte_level: Tokenizer, byte_fallback: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text), skip_special_tokens=False) == text
    # ▁ goes in front of a text that does not begin with a space, and a continuation keeps it.
    assert byte_fallback.decode(byte_fallback.encode(text)).removeprefix(" ") == text.removeprefix(" ")


@given(data=st.data())
def test_random_ids_decode_like_the_library(
    byte_level: Tokenizer, raw_byte_level: FastTokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size + 3), max_size=40))
    skip = data.draw(st.booleans())
    assert byte_level.decode(ids, skip_special_tokens=skip) == raw_byte_level.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=40))
def test_byte_fallback_decodes_text_like_the_library(
    byte_fallback: Tokenizer, byte_fallback_dir: Path, text: str
) -> None:
    raw = FastTokenizer.from_file(str(byte_fallback_dir / "tokenizer.json"))
    ids = byte_fallback.encode(text)
    assert byte_fallback.decode(ids).removeprefix(" ") == raw.decode(ids)


def test_byte_fallback_replaces_only_invalid_bytes(byte_fallback: Tokenizer) -> None:
    whole = byte_fallback.encode("你", add_special_tokens=False)
    assert byte_fallback.decode([*whole, *whole[-3:-1]]) == " 你�"


def test_special_tokens(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    assert {byte_level.token_text(i) for i in byte_level.eos_token_ids} == {"<|im_end|>", "<|endoftext|>"}
    assert {byte_fallback.token_text(i) for i in byte_fallback.eos_token_ids} == {"</s>"}
    assert byte_level.special_tokens["bos_token"] == "<|im_start|>"
    (start, *_, end) = byte_level.encode("<|im_start|>hello<|im_end|>")
    assert byte_level.is_special(start) and byte_level.is_special(end)
    assert byte_level.decode([start, end]) == ""
    assert byte_level.decode([start, end], skip_special_tokens=False) == "<|im_start|><|im_end|>"


def test_bos_is_added_where_the_model_wants_it(byte_level: Tokenizer, byte_fallback: Tokenizer, tmp_path: Path) -> None:
    bos = byte_fallback.encode("", add_special_tokens=True)
    assert [byte_fallback.token_text(i) for i in bos] == ["<s>"]
    assert byte_fallback.encode("hi") == bos + byte_fallback.encode("hi", add_special_tokens=False)
    assert byte_level.encode("hi") == byte_level.encode("hi", add_special_tokens=False)

    make_byte_fallback(tmp_path)
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": True}
    write_json(tmp_path / "tokenizer_config.json", config)  # explicit, so it overrides tokenizer.json
    overridden = Tokenizer(tmp_path)
    assert [overridden.token_text(i) for i in overridden.encode("")] == ["</s>"]


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
def test_ids_equal_those_of_transformers(request: pytest.FixtureRequest, family: str) -> None:
    from transformers import PreTrainedTokenizerFast

    ours = request.getfixturevalue(family)
    theirs = PreTrainedTokenizerFast.from_pretrained(request.getfixturevalue(f"{family}_dir"))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)


def test_text_of_a_partial_character(byte_level: Tokenizer) -> None:
    pieces = [byte_level.token_text(i) for i in byte_level.encode("𝄞")]
    assert pieces == ["\\xf0", "\\x9d", "\\x84", "\\x9e"]


def test_unusable_directory_is_rejected_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r": no tokenizer\.json; write one"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(SpecError, match="not readable as a tokenizer"):
        Tokenizer(tmp_path)
    panics = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [], "model": panics}))
    with pytest.raises(SpecError, match="not readable as a tokenizer"):
        Tokenizer(tmp_path)
    empty = FastTokenizer(models.BPE())
    empty.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(SpecError, match="vocabulary is empty"):
        Tokenizer(tmp_path)
    word_piece = FastTokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    word_piece.decoder = decoders.WordPiece()
    word_piece.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(SpecError, match="unsupported"):
        Tokenizer(tmp_path)
    make_byte_level(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(SpecError, match="not a JSON object"):
        Tokenizer(tmp_path)
