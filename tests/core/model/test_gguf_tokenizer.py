"""Tokenizers rebuilt from GGUF metadata encode and decode like the originals."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from core.model.gguf_tokenizer import build_tokenizer, end_token_ids
from core.model.gguf_words import COMPOSED, WORDS
from core.types.errors import SpecError

TEXTS = [
    "Hello world, it's 2024! We'LL see, they'd say; I'M sure.",
    "  leading and   inner    spaces\t\ttabs \n\n newlines\r\n  end  ",
    "naïve café, Ünïcödé, Ελληνικά, русский, العربية, हिन्दी, ภาษาไทย",
    "日本語のテキスト。中文字符、한국어",
    "emoji 🙂🎉👩‍👩‍👧 and e\u0301 combining, ﬁ ligature, ½ ² Ⅷ",
    "def f(x):\n    return x**2 + 1234567890 - 0.5e-3  # comment\n",
    "<|im_start|>user\nhi<|im_end|>\n<tool>x</tool><|im_start|>",
    "$100 + 5% = <b>|x|^2</b> ~~~ `code` ``` 3.14",
    "",
    " ",
]
SPECIAL = ["<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<tool>", "   "]
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
# From the models' own tokenizer.json files.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
PRE_TOKENIZERS = {
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTE_LEVEL]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), BYTE_LEVEL]),
}


def trained(pre: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(USER_DEFINED)
    return tokenizer


def metadata_of(tokenizer: Tokenizer, **more: Any) -> dict[str, Any]:

    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    kinds = {token: 3 for token in SPECIAL} | {token: 4 for token in USER_DEFINED}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [token for token, _ in vocab],
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token, _ in vocab],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": dict(vocab)[SPECIAL[0]],
        "tokenizer.ggml.eos_token_id": dict(vocab)[SPECIAL[1]],
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_tokenizers_round_trip(pre: str) -> None:
    original = trained(pre)
    rebuilt = build_tokenizer(metadata_of(original, pre=pre, add_bos_token=False))
    assert rebuilt.get_vocab() == original.get_vocab()
    for text in TEXTS:
        ids = original.encode(text).ids
        assert rebuilt.encode(text).ids == ids
        assert rebuilt.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)
        assert rebuilt.decode(ids) == original.decode(ids)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_text_round_trips(pre: str) -> None:
    rebuilt = build_tokenizer(metadata_of(trained(pre), pre=pre, add_bos_token=False))

    @given(text=st.text())
    def round_trip(text: str) -> None:
        expected = normalizers.NFC().normalize_str(text) if pre == "qwen2" else text
        assert rebuilt.decode(rebuilt.encode(text).ids, skip_special_tokens=False) == expected

    round_trip()


def test_pieces_of_the_default_pre_tokenizer() -> None:
    """llama.cpp's own pre-tokenizer, without a Hugging Face counterpart. Splits punctuation first, digits by threes."""
    rebuilt = build_tokenizer(metadata_of(trained("gpt-2"), pre="default"))
    pieces = [piece for piece, _ in rebuilt.pre_tokenizer.pre_tokenize_str("a,b 1234567 x=y it's")]
    assert pieces == ["a", ",", "b", "Ġ", "123", "456", "7", "Ġx", "=", "y", "Ġit", "'", "s"]


@pytest.mark.parametrize("name", WORDS)
def test_every_named_pre_tokenizer_loses_nothing(name: str) -> None:
    rebuilt = build_tokenizer(metadata_of(trained("gpt-2"), pre=name))
    for text in TEXTS:
        assert rebuilt.decode(rebuilt.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == (
            normalizers.NFC().normalize_str(text) if name in COMPOSED else text
        )


# From the models' own tokenizer.json files, where the GGUF name has words of another one.
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# From Kimi-K2's tokenization_kimi.py.
KIMI = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smaug-bpe", LLAMA3),
        ("glm4", LLAMA3),
        ("megrez", QWEN2),
        ("qwen35", QWEN35),
        ("gpt-4o", CASED),
        ("llama4", CASED),
        ("kimi-k2", KIMI),
    ],
)
def test_synonyms_split_like_the_models_own(name: str, words: str) -> None:
    theirs = pre_tokenizers.Split(Regex(words), "isolated")
    ours = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(one), "isolated") for one in WORDS[name]])
    for text in TEXTS:
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


def test_missing_pre_tokenizer_is_the_default_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    metadata = metadata_of(trained("gpt-2"), pre="default")
    default = build_tokenizer(metadata)
    del metadata["tokenizer.ggml.pre"]
    assert build_tokenizer(metadata).to_str() == default.to_str()
    assert "tokenizer.ggml.pre" in caplog.text


def test_bos_token_follows_the_files_setting() -> None:
    original = trained("llama-bpe")
    bos = original.token_to_id(SPECIAL[0])
    plain = original.encode("Hello").ids
    for more, expected in [({}, [bos]), ({"add_bos_token": False}, []), ({"add_bos_token": True}, [bos])]:
        rebuilt = build_tokenizer(metadata_of(original, pre="llama-bpe", **more))
        assert rebuilt.encode("Hello").ids == expected + plain
        assert rebuilt.encode("Hello", add_special_tokens=False).ids == plain
    assert build_tokenizer(metadata_of(trained("gpt-2"), pre="gpt-2")).encode("").ids == []


def test_ends_of_generation() -> None:
    metadata = {
        "tokenizer.ggml.tokens": ["a", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>"],
        "tokenizer.ggml.token_type": [1, 3, 3, 1, 4],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 0,
    }
    assert end_token_ids(metadata) == [1, 0, 2, 3, 4]
    harmony = {"tokenizer.ggml.tokens": ["<|end|>", "<|return|>", "<|call|>"], "tokenizer.ggml.eos_token_id": 1}
    assert end_token_ids(harmony) == [1, 2], "<|end|>: between the messages of one answer"


@pytest.mark.parametrize("kind", [1, 2, 4, 5])
@pytest.mark.parametrize("token", ["<|im_end|>", "<|im_start|>", "<|eot_id|>", "<end_of_turn>", "<|end_of_text|>"])
def test_control_tokens_are_known_by_name(token: str, kind: int, caplog: pytest.LogCaptureFixture) -> None:
    """Published files type <|im_end|> as user-defined or normal, and name another end token."""
    metadata = metadata_of(trained("gpt-2"), pre="gpt-2", add_bos_token=False)
    if token not in metadata["tokenizer.ggml.tokens"]:
        metadata["tokenizer.ggml.tokens"].append(token)
        metadata["tokenizer.ggml.token_type"].append(kind)
    index = metadata["tokenizer.ggml.tokens"].index(token)
    metadata["tokenizer.ggml.token_type"][index] = kind
    metadata["tokenizer.ggml.eos_token_id"] = 0
    rebuilt = build_tokenizer(metadata)
    ids = rebuilt.encode(f"hi{token}").ids
    assert ids[-1] == index and rebuilt.decode(ids) == "hi"
    assert (index in end_token_ids(metadata)) == (token != "<|im_start|>")
    assert token in caplog.text


def test_user_defined_tokens_stay_visible() -> None:
    metadata = metadata_of(trained("gpt-2"), pre="gpt-2", add_bos_token=False)
    rebuilt = build_tokenizer(metadata)
    assert rebuilt.decode(rebuilt.encode("<tool>x").ids) == "<tool>x"


PIECES = ["▁", "a", "b", "c", "n", "é", "日", "▁a", "an", "ab", "ban", "ana", "▁b", "▁ban", "nan", "na", "▁▁", "aba"]


def sentence_piece_metadata(**more: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<tool>"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4]
    # Scores in another order than the vocabulary, so that only scores decide.
    ranks = [(7 * i) % len(PIECES) for i in range(len(PIECES))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in ranks] + [0.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def naive_sentence_piece(text: str, metadata: dict[str, Any]) -> list[int]:
    """Repeatedly join the neighbours that form the best token, leftmost first."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(tokens)}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joins = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not joins:
            break
        _, i = min(joins)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [i for p in parts for i in ([ids[p]] if p in ids else [ids[f"<0x{byte:02X}>"] for byte in p.encode()])]


@settings(max_examples=2 * settings().max_examples)
@given(text=st.text(alphabet="abn c日é🙂", max_size=20))
def test_sentence_piece_merges_follow_the_scores(text: str) -> None:
    metadata = sentence_piece_metadata()
    rebuilt = build_tokenizer(metadata)
    ids = rebuilt.encode(text, add_special_tokens=False).ids
    assert ids == naive_sentence_piece(text, metadata)
    assert rebuilt.decode(ids) == text


def test_sentence_piece_special_tokens_and_spaces() -> None:
    rebuilt = build_tokenizer(sentence_piece_metadata())
    assert rebuilt.encode("a<tool>b</s>").tokens == ["<s>", "▁a", "<tool>", "▁b", "</s>"]
    without_prefix = build_tokenizer(sentence_piece_metadata(add_space_prefix=False, add_bos_token=False))
    assert without_prefix.encode("a b").tokens == ["a", "▁b"]
    assert without_prefix.decode(without_prefix.encode(" a").ids) == " a"


def test_phi3_drops_spaces_after_control_tokens() -> None:
    metadata = sentence_piece_metadata() | {"general.architecture": "phi3"}
    ours = build_tokenizer(metadata)
    assert ours.encode("a</s> \n b").ids == ours.encode("a</s>b").ids
    assert ours.encode("a<s> b").ids != ours.encode("a<s>b").ids, "<s> keeps them"
    other = build_tokenizer(metadata | {"general.architecture": "llama"})
    assert other.encode("a</s> \n b").ids != other.encode("a</s>b").ids


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model 'bert' is not supported; supported: gpt2, llama"),
        ({"pre": "klingon"}, "(tokenizer.ggml.pre) 'klingon' is not supported; supported: a.x-4.0, bailingmoe"),
        ({"merges": ()}, "no merges"),
        ({"merges": ["x nonsense"]}, "do not fit together"),
        ({"tokens": []}, "no vocabulary"),
        ({"bos_token_id": 10**6, "add_bos_token": True}, "does not name it"),
        ({"model": "llama"}, "no score for each token"),
    ],
)
def test_unsupported_metadata_is_rejected(changes: dict[str, Any], complaint: str) -> None:
    metadata = metadata_of(trained("gpt-2"), **({"pre": "gpt-2"} | changes))
    with pytest.raises(SpecError) as caught:
        build_tokenizer(metadata)
    assert complaint in str(caught.value)
