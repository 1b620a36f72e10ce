"""Streamed text equals the whole text, in whole characters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.text.choice_text import Detokenizer
from frontend.text.tokenizer import Tokenizer

FAMILY_EMOJI = "👩‍👩‍👧‍👦"  # 25 bytes: four emoji and three joiners
TEXTS = [
    "plain words",
    "你好世界",
    f"a{FAMILY_EMOJI}b🎉",
    "é ñ combining",
    "مرحبا بالعالم",
    "नमस्ते",
    "𝄞 and \U0010ffff",
    "<|im_start|>x<|im_end|>",
    "\x00�",
]


def pieces(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*map(detokenizer.add, ids), detokenizer.finish()]


@pytest.fixture(params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Tokenizer)
    return found


@pytest.mark.parametrize("text", TEXTS)
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
