"""Per-token rules of a request: logit bias, allowed tokens and bad words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from core.types.validation import check as _check

MAX_LOGIT_BIAS = 1024  # tokens, as in vLLM; OpenAI takes 300
MAX_BIAS = 100.0  # as in the OpenAI API
MAX_ALLOWED_TOKENS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024  # of all bad words, in all their tokenizations


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """Token rules of every choice of a request. They depend on a choice's generated tokens only."""

    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit); each token once
    allowed_token_ids: tuple[int, ...] = ()  # all other tokens are masked; empty: no limit
    bad_words: tuple[tuple[int, ...], ...] = ()  # the last token of each is masked after the tokens before it

    @property
    def says_nothing(self) -> bool:
        return not (self.logit_bias or self.allowed_token_ids or self.bad_words)

    def check(self, vocab_size: int) -> None:
        """Check the bounds that a step relies on. Raises RequestError that names the field.

        Kept fast: a batch call checks it for each of up to a thousand prompts.
        """
        biased, biases = zip(*self.logit_bias, strict=True) if self.logit_bias else ((), ())
        _check_ids(biased, "logit_bias", MAX_LOGIT_BIAS, vocab_size)
        _check(len(set(biased)) == len(biased), "logit_bias", "must name a token once")
        is_bounded = (
            math.isfinite(sum(biases)) and -MAX_BIAS <= min(biases, default=0) and max(biases, default=0) <= MAX_BIAS
        )
        _check(is_bounded, "logit_bias", f"must be from {-MAX_BIAS:g} to {MAX_BIAS:g}")
        _check_ids(self.allowed_token_ids, "allowed_token_ids", MAX_ALLOWED_TOKENS, vocab_size)
        _check(all(self.bad_words), "bad_words", "must have at least one token each")
        _check_ids(tuple(chain.from_iterable(self.bad_words)), "bad_words", MAX_BAD_WORD_TOKENS, vocab_size)


def _check_ids(token_ids: Sequence[int], param: str, most: int, vocab_size: int) -> None:
    _check(len(token_ids) <= most, param, f"must have at most {most} tokens, not {len(token_ids)}")
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        _check(0 <= token_id < vocab_size, param, f"{token_id} is no token id; the vocabulary has {vocab_size}")
