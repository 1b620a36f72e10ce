"""Conversion of a GGUF file's tokenizer metadata to Hugging Face's tokenizer.

Two kinds exist for the supported models. "gpt2" is byte-level BPE with ranked merges and a named pre-tokenizer; "llama"
is SentencePiece BPE with byte fallback, whose merges follow from the tokens' scores.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers, processors

from core.model.gguf_words import ADD_BOS, COMPOSED, WHOLE_WORDS_FIRST, WORDS
from core.model.sentence_piece import Prefix, merged_by_score
from core.model.tokenizer_file import split_to_bytes
from core.types.errors import SpecError

logger = logging.getLogger(__name__)

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # token types
# Tokens that end a turn. Files often name only one of theirs, or give them the type of ordinary tokens.
_END_OF_GENERATION = frozenset(
    (
        *("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"),
        *("</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>", "<turn|>", "<|tool_response>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    )
)
_CONTROL_NAMES = _END_OF_GENERATION | frozenset(
    (
        *("<|im_start|>", "<|im_sep|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"),
        *("<|start_of_role|>", "<|end_of_role|>", "<|startoftext|>", "<|system|>", "<|user|>", "<|assistant|>"),
        *("<s>", "<bos>", "<start_of_turn>", "[INST]", "[/INST]", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"),
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    )
)
# llama.cpp's converter types tokens of this form as control tokens.
_LOOKS_SPECIAL = re.compile(r"<(\|[^\s|]+\||\uff5c[^\s\uff5c]+\uff5c)>")
# In vocabularies with one of these pairs, <|end|> separates messages of one answer.
_NOT_LAST = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})
_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")
# Default ids, which SentencePiece files omit.
_USUAL_IDS = {"unknown": 0, "bos": 1, "eos": 2}


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
    control = _control_tokens(metadata)
    user_defined = [token for token, kind in _typed_tokens(metadata) if kind == _USER_DEFINED and token not in control]
    # Phi-3's tokenizer drops spaces after control tokens; the file does not say so.
    strips = kind == "llama" and metadata.get("general.architecture") == "phi3"
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, rstrip=strips and token not in _KEEP_SPACES) for token in control]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in user_defined])
    if adds_bos(metadata):
        bos = special_token(metadata, "bos")
        if bos is None:
            raise SpecError("the GGUF requires a beginning-of-sequence token and does not name it")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, special_token_id(metadata, "bos"))]
        )
    return tokenizer


def adds_bos(metadata: dict[str, Any]) -> bool:
    """Return whether prompts start with the beginning-of-sequence token. The default is llama.cpp's."""
    is_default = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in ADD_BOS
    return bool(metadata.get("tokenizer.ggml.add_bos_token", is_default))


def special_token_id(metadata: dict[str, Any], role: str) -> int | None:
    """Return the id of a special token ("bos", "eos", "unknown", "padding"), or None."""
    usual = _USUAL_IDS.get(role) if metadata.get("tokenizer.ggml.model") == "llama" else None
    index = metadata.get(f"tokenizer.ggml.{role}_token_id", usual)
    return index if isinstance(index, int) and 0 <= index < len(_tokens(metadata)) else None


def special_token(metadata: dict[str, Any], role: str) -> str | None:
    """Return the text of a special token, or None."""
    index = special_token_id(metadata, role)
    return None if index is None else _tokens(metadata)[index]


def end_token_ids(metadata: dict[str, Any]) -> list[int]:
    """Return the ids that end generation: the file's own, then tokens of the vocabulary that are known to end it."""
    own = (special_token_id(metadata, role) for role in ("eos", "eot", "eom"))
    tokens = _tokens(metadata)
    known = _END_OF_GENERATION.intersection(tokens)
    if any(pair <= known for pair in _NOT_LAST):
        known -= {"<|end|>"}
    others = (index for index, token in enumerate(tokens) if token in known)
    return list(dict.fromkeys([*(index for index in own if index is not None), *others]))


def _control_tokens(metadata: dict[str, Any]) -> list[str]:
    """Return the control tokens: by type, or by name if the type is wrong. Warns about wrong types."""
    tokens = _typed_tokens(metadata)
    renamed = [
        token
        for token, kind in tokens
        if kind != _CONTROL and (token in _CONTROL_NAMES or (kind != _USER_DEFINED and _LOOKS_SPECIAL.fullmatch(token)))
    ]
    if renamed:
        logger.warning("tokens that the GGUF does not type as control tokens are taken as such: %s", ", ".join(renamed))
    return [token for token, kind in tokens if kind == _CONTROL or token in set(renamed)]


def _typed_tokens(metadata: dict[str, Any]) -> list[tuple[str, int]]:
    tokens, types = _tokens(metadata), metadata.get("tokenizer.ggml.token_type", [])
    return list(zip(tokens, [*types, *[_NORMAL] * (len(tokens) - len(types))], strict=False))


def _tokens(metadata: dict[str, Any]) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise SpecError("the GGUF has no vocabulary (tokenizer.ggml.tokens)")
    return tokens


def _byte_level(metadata: dict[str, Any]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre is None:
        logger.warning("the GGUF names no pre-tokenizer (tokenizer.ggml.pre): words are split by llama.cpp's default")
        pre = "default"
    if pre not in WORDS:
        raise SpecError(
            f"the GGUF's pre-tokenizer (tokenizer.ggml.pre) {pre!r} is not supported; supported: "
            f"{', '.join(sorted(WORDS))}. Use the model's Hugging Face directory instead"
        )
    vocab = {token: index for index, token in enumerate(_tokens(metadata))}
    # A merge is two tokens separated by a space; tokens contain no space, because it is spelled Ġ.
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    if not merges:
        raise SpecError("the GGUF has no merges (tokenizer.ggml.merges)")
    tokenizer = _bpe(vocab=vocab, merges=merges, ignore_merges=pre in WHOLE_WORDS_FIRST)
    if pre in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    split_to_bytes(tokenizer, WORDS[pre])
    return tokenizer


def _bpe(**settings: Any) -> Tokenizer:
    # The library panics, which `except Exception` does not catch, at a merge whose result is longer than every token.
    if absent := next((merge for merge in settings["merges"] if "".join(merge) not in settings["vocab"]), None):
        text = f"merge {' '.join(absent)!r} forms no token"
        raise SpecError(f"the GGUF's vocabulary and merges do not fit together: {text}; download it again")
    return _fitting(lambda: Tokenizer(models.BPE(**settings)))


def _fitting(make: Callable[..., Tokenizer], *arguments: Any, **settings: Any) -> Tokenizer:
    """Make a tokenizer. Raises SpecError if the library does not accept the vocabulary."""
    try:
        return make(*arguments, **settings)
    except Exception as error:  # tokenizers raises nothing more precise
        text = " ".join(str(error).split())
        raise SpecError(f"the GGUF's vocabulary and merges do not fit together: {text}") from error


def _sentence_piece(metadata: dict[str, Any]) -> Tokenizer:
    tokens, scores = _tokens(metadata), metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise SpecError("the GGUF has no score for each token (tokenizer.ggml.scores)")
    prefix: Prefix = "always" if metadata.get("tokenizer.ggml.add_space_prefix", True) else "never"
    return _fitting(merged_by_score, tokens, scores, unknown=special_token(metadata, "unknown"), prefix=prefix)
