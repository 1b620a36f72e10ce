"""Tokenizer files of other formats, and those beside tokenizer.json, against tiktoken and transformers."""

from __future__ import annotations

import json
import random
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from core.grammar.compiler import GrammarCompiler
from core.model.tokenizer_file import BYTE_OF, TEKKEN, check_tokenizer, open_tokenizer
from core.types.errors import SpecError
from core.types.request import Grammar, GrammarKind
from frontend.text.answer_events import Detokenizer
from frontend.text.tokenizer import Tokenizer as ModelTokenizer
from tests.core.model.test_gguf_tokenizer import KIMI
from tests.support.tiny_tokenizers import CORPUS, make_byte_level, write_json

# From Mistral's own files.
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NUM_SPECIAL = 30
_NAMED = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<think>"}  # the first ids behind the vocabulary
_POOLS = [
    "abAB yz", "aba", " \t\n\r  ", "0123456789.,", "'sS'tT'reLL'd ", "中文世界汉字〇々", "日本語ひらがなカタカナ",
    "한국어", "éàüÅṇ", "ΑΒαβЖжшщ", "हिन्दी", "العربية", "🎉\u200d👩", 
    "!\"#$%&/()=?{}[]<>|\\", "ǅǈªºʰ", "\u3000\xa0\u200b\u2028",
]  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    texts = [*CORPUS, *(path.read_text() for path in sorted(Path("docs").glob("*.md"))[:3])]
    trained.train_from_iterator(texts, trainer)
    ranks = {bytes(BYTE_OF[character] for character in token): i for token, i in trained.get_vocab().items()}
    return {**ranks, b"qzqz": len(ranks)}  # no two tokens form this one


def write_kimi(directory: Path, ranks: dict[bytes, int], **settings: Any) -> Path:
    directory.mkdir(exist_ok=True)
    lines = [b64encode(token) + b" %d\n" % i for token, i in ranks.items()]  # in no order
    (directory / "tiktoken.model").write_bytes(b"".join(lines))
    added = {str(len(ranks) + i): {"content": text, "special": text != "<think>"} for i, text in _NAMED.items()}
    names = {"bos_token": "[BOS]", "eos_token": "[EOS]"}
    write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added, **names, **settings},
    )
    write_json(directory / "config.json", {"vocab_size": len(ranks) + 8})
    return directory


def write_tekken(directory: Path, ranks: dict[bytes, int], **settings: Any) -> Path:
    directory.mkdir(exist_ok=True)
    tokens = [{"rank": i, "token_bytes": b64encode(token).decode()} for token, i in ranks.items()]
    unused = [{"rank": len(ranks) + i, "token_bytes": b64encode(b"unused%d" % i).decode()} for i in range(9)]
    config = {"pattern": _TEKKEN, "default_vocab_size": len(ranks) + _NUM_SPECIAL, "version": "v7"}
    config["default_num_special_tokens"] = _NUM_SPECIAL
    write_json(directory / TEKKEN, {"config": config, "vocab": tokens + unused, **settings})
    return directory


def _kimi(directory: Path, ranks: dict[bytes, int]) -> tuple[Tokenizer, Callable[[str], list[int]]]:
    added = {_NAMED.get(i, f"<|reserved_token_{len(ranks) + i}|>"): len(ranks) + i for i in range(8)}
    judge = tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens=added)
    return open_tokenizer(write_kimi(directory, ranks)), lambda text: judge.encode(text, allowed_special="all")


def _tekken(directory: Path, ranks: dict[bytes, int]) -> tuple[Tokenizer, Callable[[str], list[int]]]:
    judge = tiktoken.Encoding("tekken", pat_str=_TEKKEN, mergeable_ranks=ranks, special_tokens={})

    def encode(text: str) -> list[int]:
        return [i + _NUM_SPECIAL for i in judge.encode_ordinary(text)]

    return open_tokenizer(write_tekken(directory, ranks)), encode


def _texts(number: int) -> Iterator[str]:
    rng = random.Random(7)
    words = Path("docs/ARCHITECTURE.md").read_text().split()
    for _ in range(number):
        kind = rng.randrange(5)
        if kind == 0:
            yield "".join(rng.choice(rng.choice(_POOLS)) for _ in range(rng.randrange(60)))
        elif kind == 1:
            yield "".join(rng.choice("".join(rng.sample(_POOLS, 3))) for _ in range(rng.randrange(60)))
        elif kind == 2:
            yield rng.choice(_POOLS)[:2] * rng.randrange(40)
        elif kind == 3:
            codes = (rng.randrange(0x30000) for _ in range(rng.randrange(20)))
            yield "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)
        else:
            yield "".join(rng.choice(words) + rng.choice(["", " ", "  ", "\n", "_"]) for _ in range(rng.randrange(20)))


@pytest.mark.parametrize("made", [_kimi, _tekken], ids=["kimi", "tekken"])
def test_ids_equal_those_of_tiktoken(made: Any, tmp_path: Path, ranks: dict[bytes, int]) -> None:
    tokenizer, judge = made(tmp_path / "model", ranks)
    for text in ["qzqz qzqzq", *_texts(3000)]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == judge(text), repr(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_of_kimi(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    tokenizer, judge = _kimi(tmp_path / "model", ranks)
    text = f"a<|im_end|>b [EOS]<|reserved_token_{len(ranks) + 6}|>中<think>"
    assert tokenizer.encode(text).ids == judge(text)
    ours = ModelTokenizer(tmp_path / "model")
    assert ours.decode(ours.encode(text)) == "ab 中<think>", "tokens that are not special belong to the text"
    assert ours.eos_token_ids == {len(ranks) + 1} and ours.vocab_size == len(ranks) + 8
    (tmp_path / "model" / "config.json").unlink()
    assert ModelTokenizer(tmp_path / "model").vocab_size == len(ranks) + 4


@pytest.mark.parametrize("is_listed", [False, True])
def test_special_tokens_of_tekken(is_listed: bool, tmp_path: Path, ranks: dict[bytes, int]) -> None:
    listed = [
        {"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(["<unk>", "<s>", "</s>", "[X]"])
    ]
    directory = write_tekken(tmp_path / "model", ranks, **({"special_tokens": listed} if is_listed else {}))
    ours = ModelTokenizer(directory)
    assert ours.encode("a")[0] == 1 and ours.eos_token_ids == {2} and ours.special_tokens["bos_token"] == "<s>"
    named, other = ("[X]", "[INST]") if is_listed else ("[INST]", "[X]")
    assert ours.ids_of([named]) == {3} and not ours.ids_of([other])
    assert ours.ids_of([f"<SPECIAL_{_NUM_SPECIAL - 1}>"]) == {_NUM_SPECIAL - 1}
    assert ours.vocab_size == _NUM_SPECIAL + len(ranks), "tokens beyond the model's vocabulary are left out"


@pytest.mark.parametrize("write", [write_kimi, write_tekken])
def test_converted_tokenizer_streams_and_has_grammars(write: Any, tmp_path: Path, ranks: dict[bytes, int]) -> None:
    directory = write(tmp_path / "model", ranks)
    ours = ModelTokenizer(directory)
    for text in [*CORPUS, "Größe 🎉 你好\n\n'll  x"]:
        ids = ours.encode(text, add_special_tokens=False)
        streamed = Detokenizer(ours)
        assert "".join([*map(streamed.add, ids), streamed.finish()]) == ours.decode(ids) == text
    compiled = GrammarCompiler(directory, vocab_size=ours.vocab_size).compile(
        Grammar(kind=GrammarKind.REGEX, text="Paris|世界")
    )
    words = compiled.mask(ours.eos_token_ids).allowed([], 0)
    firsts = {ours.token_bytes(i)[:1] for i in range(ours.vocab_size) if int(words[i >> 5]) >> (i & 31) & 1}
    assert firsts == {b"P", "世".encode()[:1]}


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        (None, "", "no tokenizer.json; write one (`pip install transformers"),
        ("qwen.tiktoken", "", "no tokenizer.json; qwen.tiktoken does not contain its split pattern"),
        ("tiktoken.model", "", "no tokenizer.json; tiktoken.model does not contain its split pattern"),
        (TEKKEN, "{}", "tekken.json: not readable as a tokenizer: 'config'"),
        (TEKKEN, "[]", "tekken.json: not a JSON object"),
        ("tokenizer.json", "{", "tokenizer.json: not readable as a tokenizer"),
    ],
)
def test_unusable_directories(name: str | None, content: str, complaint: str, tmp_path: Path) -> None:
    if name:
        (tmp_path / name).write_text(content)
    with pytest.raises(SpecError) as caught:
        open_tokenizer(tmp_path)
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_contradict_themselves(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    directory = write_kimi(tmp_path / "model", {**ranks, b"[BOS]": len(ranks)})
    with pytest.raises(SpecError, match=r"tiktoken.model: .* same text: '\[BOS\]'"):
        open_tokenizer(directory)
    (directory / "tiktoken.model").write_text("no base64 at all\n")
    with pytest.raises(SpecError, match=r"tiktoken.model: not readable as a tokenizer"):
        open_tokenizer(directory)


def test_huggingface_file_comes_first(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    directory = write_tekken(tmp_path / "model", ranks)
    open_tokenizer(directory).save(str(directory / "tokenizer.json"))
    assert check_tokenizer(directory).name == "tokenizer.json"
    tree = json.loads((directory / "tokenizer.json").read_text())
    assert open_tokenizer(directory).to_str() == Tokenizer.from_str(json.dumps(tree)).to_str()


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
    ours, theirs = ModelTokenizer(directory), AutoTokenizer.from_pretrained(directory)
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
