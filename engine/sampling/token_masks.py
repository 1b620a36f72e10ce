"""Token rules of a request (bias, allowed tokens, bad words) in the sampler's format."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from core.types.request import TokenRules


class TokenRuleTensors:
    """Token rules as arrays. Immutable; shared by all choices of a request."""

    def __init__(self, rules: TokenRules) -> None:
        self.biased = np.array([token_id for token_id, _ in rules.logit_bias], np.int64)
        self.biases = np.array([bias for _, bias in rules.logit_bias], np.float32)  # one per biased token
        self.allowed = np.array(rules.allowed_token_ids, np.int64)  # empty: all tokens
        self._bad_words = _Ending()
        for word in rules.bad_words:
            ending = self._bad_words
            for token_id in word[-2::-1]:
                ending = ending.longer.setdefault(token_id, _Ending())
            ending.forbidden.append(word[-1])

    @property
    def reads_tokens(self) -> bool:
        """True if the forbidden tokens depend on the generated ones."""
        return bool(self._bad_words.longer)

    def forbidden(self, tokens: Seq[int], start: int) -> list[int]:
        """Return the tokens that would complete a bad word after tokens[start:]. O(length of the longest bad word)."""
        ending = self._bad_words
        if not ending.longer:
            return ending.forbidden
        found, position = list(ending.forbidden), len(tokens)
        while position > start:
            position -= 1
            longer = ending.longer.get(tokens[position])
            if longer is None:
                break
            found += longer.forbidden
            ending = longer
        return found


@dataclass(slots=True)
class _Ending:
    """Trie node of bad words: a suffix of the generated tokens."""

    forbidden: list[int] = field(default_factory=list)  # tokens forbidden after it
    longer: dict[int, _Ending] = field(default_factory=dict)  # by the preceding token
