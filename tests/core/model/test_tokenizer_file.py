"""Tokens that the files beside tokenizer.json add or mark as special, compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from core.grammar.compiler import GrammarCompiler
from core.model.tokenizer_file import open_tokenizer
from core.types.errors import SpecError
from frontend.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import make_byte_level, write_json

_TEXT = "the <|im_end|> of <tool_call>x</tool_call> <|endoftext|> course"
_CONFIG = "tokenizer_config.json"


def _token(content: str, *, special: bool = True, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, **plain, **flags, "special": special}


def _made(directory: Path, *, ordinary: str = "", hidden: str = "", file: str = _CONFIG, **settings: Any) -> Path:
    """Write a model directory. ordinary: a token that tokenizer.json has as a word only. hidden: one that it adds there
    and not special. file: gets the settings."""
    make_byte_level(directory)
    tree = json.loads((directory / "tokenizer.json").read_text())
    tree["added_tokens"] = [one | {"special": one["special"] and one["content"] != hidden}
                            for one in tree["added_tokens"] if one["content"] != ordinary]  # fmt: skip
    write_json(directory / "tokenizer.json", tree)
    write_json(directory / "config.json", {"model_type": "llama"})
    for name, more in ((_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast"}), (file, settings)):
        kept = json.loads((directory / name).read_text()) if (directory / name).exists() else {}
        write_json(directory / name, kept | more)
    return directory


_CASES: dict[str, dict[str, Any]] = {
    "tokens of tokenizer.json": {},
    "a token only in tokenizer_config.json": {"added_tokens_decoder": {"421": _token("<tool_call>", special=False)}},
    "a special token only there": {"added_tokens_decoder": {"421": _token("<tool_call>")}},
    "other flags there": {"added_tokens_decoder": {"2": _token("<|im_end|>", lstrip=True)}},
    "a token only in added_tokens.json": {"file": "added_tokens.json", "<tool_call>": 421},
    "an end token that is an ordinary word": {"ordinary": "<|im_end|>"},
    "an end token that is not special": {"hidden": "<|im_end|>"},
    "an unnamed special token that is an ordinary word": {
        "ordinary": "<|endoftext|>", "additional_special_tokens": ["<|endoftext|>"]
    },
    "names in special_tokens_map.json": {
        "ordinary": "<|endoftext|>", "file": "special_tokens_map.json", "pad_token": "<|endoftext|>"
    },
}  # fmt: skip


@pytest.mark.parametrize("case", _CASES)
def test_tokens_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    directory = _made(tmp_path, **_CASES[case])
    ours, theirs = Tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    ids = theirs(_TEXT)["input_ids"]
    assert ours.encode(_TEXT) == ids and 2 in ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    compiler = GrammarCompiler(directory, vocab_size=ours.vocab_size)
    assert {text: i for text, i in compiler.special_tokens.items() if ours.is_special(i)} == {
        token.content: i for i, token in theirs.added_tokens_decoder.items() if token.special
    }


def test_names_outside_the_vocabulary_are_text(tmp_path: Path) -> None:
    """transformers gives them ids past the last row of the model."""
    plain = open_tokenizer(_made(tmp_path)).get_vocab()
    assert open_tokenizer(_made(tmp_path, pad_token="[PAD]", extra_special_tokens=["<new>"])).get_vocab() == plain


@pytest.mark.parametrize(
    ("decoder", "complaint"),
    [
        ({"500": _token("<new>")}, "token <new> has id 500, where tokenizer.json leads to 421"),
        ({"x": _token("<new>")}, "its added tokens are not readable"),
        ({"421": "<new>"}, "its added tokens are not readable"),
        ({"421": {"content": 3}}, "its added tokens are not readable"),
        ([1], "its added tokens are not readable"),
    ],
    ids=str,
)
def test_invalid_tokens_are_refused(decoder: Any, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=complaint):
        open_tokenizer(_made(tmp_path, added_tokens_decoder=decoder))
