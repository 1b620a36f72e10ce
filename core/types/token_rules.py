"""What a client says of single tokens: which are wanted more, or less, which alone, and which not behind others."""

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
MAX_BAD_WORD_TOKENS = 1024  # of all bad words, in all ways to write them


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """The same for every choice of a request. What they say of the next token is a function of those that a choice has
    generated."""

    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its logit); each token once
    allowed_token_ids: tuple[int, ...] = ()  # no other is chosen; none: all may be
    bad_words: tuple[tuple[int, ...], ...] = ()  # the last token of each is not chosen behind the rest of it

    @property
    def says_nothing(self) -> bool:
        return not (self.logit_bias or self.allowed_token_ids or self.bad_words)

    def check(self, vocab_size: int) -> None:
        """What a step must be able to rely upon. Raises RequestError that names the field."""
        # A call may have a thousand prompts, of each of which this is checked.
        biased, biases = zip(*self.logit_bias, strict=True) if self.logit_bias else ((), ())
        _check_ids(biased, "logit_bias", MAX_LOGIT_BIAS, vocab_size)
        _check(len(set(biased)) == len(biased), "logit_bias", "must name a token once")
        is_bounded = (
            math.isfinite(sum(biases)) and -MAX_BIAS <= min(biases, default=0) and max(biases, default=0) <= MAX_BIAS
        )
        _check(is_bounded, "logit_bias", f"must be from {-MAX_BIAS:g} to {MAX_BIAS:g}")
        _check_ids(self.allowed_token_ids, "allowed_token_ids", MAX_ALLOWED_TOKENS, vocab_size)
        _check(all(self.bad_words), "bad_words", "must be a token at least")
        _check_ids(tuple(chain.from_iterable(self.bad_words)), "bad_words", MAX_BAD_WORD_TOKENS, vocab_size)


def _check_ids(token_ids: Sequence[int], param: str, most: int, vocab_size: int) -> None:
    _check(len(token_ids) <= most, param, f"at most {most} tokens are taken, not {len(token_ids)}")
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        _check(0 <= token_id < vocab_size, param, f"{token_id} is no token id; the vocabulary has {vocab_size}")
