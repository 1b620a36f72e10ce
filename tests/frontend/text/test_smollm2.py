"""Tokenizer and chat template of the demo model, against transformers."""

from __future__ import annotations

import threading
import time
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from frontend.chat.chat_template import ChatTemplate
from frontend.chat.template_files import find_chat_template
from frontend.text.choice_text import Detokenizer
from frontend.text.tokenizer import Tokenizer

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


def test_answer_ends_with_im_end(smollm2_dir: Path) -> None:
    ours, _ = load(smollm2_dir)
    assert "<|im_end|>" in {ours.token_text(token_id) for token_id in ours.eos_token_ids}


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
