"""Tokenizers and streamed text, against transformers and the tokenizers library."""

from __future__ import annotations

import threading
import time
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from core.types.errors import SpecError
from frontend.chat.chat_template import ChatTemplate, find_chat_template
from frontend.text.answer_events import Detokenizer
from frontend.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import make_byte_fallback, make_byte_level, write_json

TEXTS = [
    *("The capital of France", "你好世界 🎉", "é vs é", "tabs\tand\n\nlines", " lead", "\x00"),
    *("<|im_start|>user\nhi<|im_end|>", "an added <think> so on"),
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


@pytest.mark.parametrize("is_nested", [False, True])
def test_config_names_the_ends_without_a_generation_config(is_nested: bool, tmp_path: Path) -> None:
    """Models that read images keep the settings of their text model apart."""
    make_byte_level(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    ends = {"eos_token_id": [0]}
    write_json(tmp_path / "config.json", {"text_config": ends} if is_nested else ends)
    assert {Tokenizer(tmp_path).token_text(i) for i in Tokenizer(tmp_path).eos_token_ids} == {
        "<|im_end|>",
        "<|endoftext|>",
    }


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


_UNUSABLE: dict[str, str] = {  # content of tokenizer.json, and the reason
    "{": "not readable as a tokenizer",
    '{"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}}': "not readable",
    FastTokenizer(models.BPE()).to_str(): "vocabulary is empty",
    FastTokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    .to_str()
    .replace('"decoder":null', '"decoder":{"type":"WordPiece","prefix":"##","cleanup":true}'): "unsupported",
}


def test_unusable_directory_is_rejected_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r": no tokenizer\.json; write one"):
        Tokenizer(tmp_path)
    for content, reason in _UNUSABLE.items():
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(SpecError, match=reason):
            Tokenizer(tmp_path)
    make_byte_level(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(SpecError, match="not a JSON object"):
        Tokenizer(tmp_path)


FAMILY_EMOJI = "👩‍👩‍👧‍👦"  # 25 bytes: four emoji and three joiners
STREAMED = [
    *("plain words", "你好世界", f"a{FAMILY_EMOJI}b🎉", "é ñ combining", "مرحبا بالعالم", "नमस्ते"),
    *("𝄞 and \U0010ffff", "<|im_start|>x<|im_end|>", "\x00�"),
]


def pieces(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*map(detokenizer.add, ids), detokenizer.finish()]


@pytest.fixture(params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Tokenizer)
    return found


@pytest.mark.parametrize("text", STREAMED)
def test_text_arrives_in_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    streamed = pieces(tokenizer, ids, skip_special_tokens=False)
    assert "".join(streamed).removeprefix(" ") == text
    if "�" not in text:
        assert not any("�" in piece for piece in streamed)
    assert streamed[-1] == ""  # nothing was held back


# No function-scoped fixture here: hypothesis runs the body many times.
@given(data=st.data())
def test_random_ids_join_to_the_whole_text(
    byte_level: Tokenizer, byte_fallback: Tokenizer, data: st.DataObject
) -> None:
    tokenizer = data.draw(st.sampled_from([byte_level, byte_fallback]))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=60))
    skip = data.draw(st.booleans())
    streamed = pieces(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(streamed) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=60), cut=st.integers(0, 200))
def test_truncated_text_is_a_prefix_with_a_replacement_character(byte_level: Tokenizer, text: str, cut: int) -> None:
    ids = byte_level.encode(text)[:cut]
    *streamed, last = pieces(byte_level, ids, skip_special_tokens=False)
    assert text.startswith("".join(streamed))
    assert last in ("", "�")  # a character that was never completed


def test_special_tokens_inside_a_character(byte_level: Tokenizer) -> None:
    first, *rest = byte_level.encode("𝄞")
    (special,) = byte_level.encode("<|im_end|>")
    ids = [first, special, *rest]
    assert "".join(pieces(byte_level, ids)) == "𝄞"
    assert "".join(pieces(byte_level, ids, skip_special_tokens=False)) == "�<|im_end|>���"


QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TURNS = [{"role": "system", "content": "Be brief."}, *QUESTION, {"role": "assistant", "content": "Paris."}, *QUESTION]


@cache
def load(model_dir: Path) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    return Tokenizer(model_dir), PreTrainedTokenizerFast.from_pretrained(model_dir)


@pytest.mark.parametrize("messages", [QUESTION, TURNS], ids=["question", "turns"])
def test_chat_tokens_equal_those_of_transformers(smollm2_dir: Path, messages: list[dict[str, str]]) -> None:
    ours, theirs = load(smollm2_dir)
    template = ChatTemplate(find_chat_template(smollm2_dir), special_tokens=ours.special_tokens)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.encode(template.render(messages), add_special_tokens=False) == expected


def test_tokenizing_a_long_text_does_not_block_others(smollm2_dir: Path) -> None:
    ours, _ = load(smollm2_dir)
    text = "Words, and there are many. " * 10_000
    took_s = 0.0

    def encode() -> None:
        nonlocal took_s
        began_at = time.perf_counter()
        ours.encode(text)
        took_s = time.perf_counter() - began_at

    thread, looks = threading.Thread(target=encode), [time.perf_counter()]
    thread.start()
    while thread.is_alive():
        looks.append(time.perf_counter())
    assert max(after - before for before, after in pairwise(looks)) < took_s / 2


@given(text=st.text(max_size=30))
def test_text_tokens_equal_those_of_transformers(smollm2_dir: Path, text: str) -> None:
    ours, theirs = load(smollm2_dir)
    assert ours.encode(text) == theirs.encode(text)


@given(ids=st.lists(st.integers(0, 49_151), max_size=40), skip=st.booleans())
def test_streamed_text_equals_the_whole_text(smollm2_dir: Path, ids: list[int], skip: bool) -> None:
    ours, theirs = load(smollm2_dir)
    detokenizer = Detokenizer(ours, skip_special_tokens=skip)
    streamed = "".join(map(detokenizer.add, ids)) + detokenizer.finish()
    assert streamed == theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
