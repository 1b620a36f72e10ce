"""Conversion of a GGUF file's tokenizer metadata to Hugging Face's tokenizer.

Two kinds exist for the supported models. "gpt2" is byte-level BPE with ranked merges and a named pre-tokenizer; "llama"
is SentencePiece BPE with byte fallback, whose merges follow from the tokens' scores.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from core.types.errors import SpecError

_CONTROL, _USER_DEFINED = 3, 4  # token types
# Control tokens that end a turn. Files often name only one of those they contain.
_END_OF_GENERATION = frozenset(
    ("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
)

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3_WORDS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT_WORDS = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")

# Each regular expression splits the pieces of the one before it. Keys: `tokenizer.ggml.pre`, as in llama.cpp.
_WORDS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT_WORDS,
    "gpt-2": (_GPT2_WORDS,),
    "smollm": (r"\p{N}", _GPT2_WORDS),
    "llama-bpe": (_LLAMA3_WORDS,),
    "llama3": (_LLAMA3_WORDS,),
    "llama-v3": (_LLAMA3_WORDS,),
    "falcon3": (_LLAMA3_WORDS,),
    "qwen2": (_QWEN2_WORDS,),
    "deepseek-r1-qwen": (_QWEN2_WORDS,),
    "tekken": (_TEKKEN_WORDS,),
}
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")  # words in the vocabulary are not split
_COMPOSED = ("qwen2", "deepseek-r1-qwen")  # text is normalized to NFC


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer. It adds a beginning-of-sequence token if the file requires one. Raises SpecError."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata)
    elif kind == "llama":
        tokenizer = _sentence_piece(metadata)
    else:
        raise SpecError(f"the GGUF's tokenizer.ggml.model {kind!r} is not supported; supported: gpt2, llama")
    # Both kinds match their literal text and keep their ids in the vocabulary.
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in _tokens_of_type(metadata, _CONTROL)])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in _tokens_of_type(metadata, _USER_DEFINED)])
    if adds_bos(metadata):
        bos = special_token(metadata, "bos")
        if bos is None:
            raise SpecError("the GGUF requires a beginning-of-sequence token and does not name it")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, metadata["tokenizer.ggml.bos_token_id"])]
        )
    return tokenizer


def adds_bos(metadata: dict[str, Any]) -> bool:
    """Return whether prompts start with the beginning-of-sequence token. The default is llama.cpp's."""
    is_default = (
        metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS_FIRST
    )
    return bool(metadata.get("tokenizer.ggml.add_bos_token", is_default))


def special_token(metadata: dict[str, Any], role: str) -> str | None:
    """Return the text of a special token ("bos", "eos", "unknown", "padding"), or None."""
    index = metadata.get(f"tokenizer.ggml.{role}_token_id")
    tokens = _tokens(metadata)
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None


def end_token_ids(metadata: dict[str, Any]) -> list[int]:
    """Return the ids that end generation: the file's own, then the known control tokens in its vocabulary."""
    own = (metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom"))
    known = set(_tokens_of_type(metadata, _CONTROL)) & _END_OF_GENERATION
    others = (index for index, token in enumerate(_tokens(metadata)) if token in known)
    return list(dict.fromkeys([*(index for index in own if index is not None), *others]))


def _tokens_of_type(metadata: dict[str, Any], token_type: int) -> list[str]:
    types = metadata.get("tokenizer.ggml.token_type", ())
    return [token for token, kind in zip(_tokens(metadata), types, strict=False) if kind == token_type]


def _tokens(metadata: dict[str, Any]) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise SpecError("the GGUF has no vocabulary (tokenizer.ggml.tokens)")
    return tokens


def _byte_level(metadata: dict[str, Any]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _WORDS:
        raise SpecError(
            f"the GGUF's pre-tokenizer (tokenizer.ggml.pre) {pre!r} is not supported; supported: "
            f"{', '.join(sorted(_WORDS))}. Use the model's Hugging Face directory instead"
        )
    vocab = {token: index for index, token in enumerate(_tokens(metadata))}
    # A merge is two tokens separated by a space; tokens contain no space, because it is spelled Ġ.
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    if not merges:
        raise SpecError("the GGUF has no merges (tokenizer.ggml.merges)")
    tokenizer = _bpe(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(words), behavior="isolated") for words in _WORDS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _bpe(**settings: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(**settings))
    except Exception as error:  # tokenizers raises nothing more precise
        text = " ".join(str(error).split())
        raise SpecError(f"the GGUF's vocabulary and merges do not fit together: {text}") from error


def _sentence_piece(metadata: dict[str, Any]) -> Tokenizer:
    tokens, scores = _tokens(metadata), metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise SpecError("the GGUF has no score for each token (tokenizer.ggml.scores)")
    tokenizer = _bpe(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=_merges_from_scores(tokens, scores),
        unk_token=special_token(metadata, "unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    spaces, decoded = normalizers.Replace(" ", "▁"), [decoders.Replace("▁", " "), decoders.ByteFallback()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        tokenizer.decoder = decoders.Sequence([*decoded, decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence([*decoded, decoders.Fuse()])
    return tokenizer


def _merges_from_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Return ranked merges for SentencePiece, which joins the neighbours that form the token of the highest score:
    each split of a token into two others is a merge, ranked by the token's score."""
    index_of = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in index_of and right in index_of:
                merges.append((-score, index_of[left], index_of[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]
