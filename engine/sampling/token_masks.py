"""What the token rules of a request say of the next token, laid out for a sampler."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from core.types.token_rules import TokenRules


class TokenRuleTensors:
    """Only reads after construction: all choices of a request share it."""

    def __init__(self, rules: TokenRules) -> None:
        self.biased = np.array([token_id for token_id, _ in rules.logit_bias], np.int64)
        self.biases = np.array([bias for _, bias in rules.logit_bias], np.float32)  # of each of these
        self.allowed = np.array(rules.allowed_token_ids, np.int64)  # none: all are
        self._bad_words = _Ending()
        for word in rules.bad_words:
            ending = self._bad_words
            for token_id in word[-2::-1]:
                ending = ending.longer.setdefault(token_id, _Ending())
            ending.forbidden.append(word[-1])

    @property
    def reads_tokens(self) -> bool:
        """What is forbidden depends on what was generated."""
        return bool(self._bad_words.longer)

    def forbidden(self, tokens: Seq[int], start: int) -> list[int]:
        """What would end a bad word behind tokens[start:]. Takes as many steps as the longest of them has tokens."""
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
    """Of what was generated: the last so many tokens."""

    forbidden: list[int] = field(default_factory=list)  # behind it
    longer: dict[int, _Ending] = field(default_factory=dict)  # by the token before it
