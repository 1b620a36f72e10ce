"""For how long an answer may think before it begins, as a router tells it to those who choose tokens."""

from __future__ import annotations

from dataclasses import dataclass

from core.types.validation import check as _check

_MAX_MARKER = 256  # characters, and tokens


@dataclass(frozen=True, kw_only=True)
class ThinkingBudget:
    """The same for every choice of a request. What it says of the next token is a function of those that a choice has
    generated: when it has thought for `num_tokens`, the tokens of `closing_ids` come, one behind the other."""

    num_tokens: int  # between the markers; 0: the closing one comes at once
    is_open: bool  # the prompt's end has begun the thinking; else the answer may, with `opening`
    opening: str  # as it stands in the text, whichever tokens it is made of
    closing: str
    closing_ids: tuple[int, ...]  # of `closing`

    def check(self, vocab_size: int) -> None:
        """What a step must be able to rely upon. Raises RequestError that names the field."""
        _check(self.num_tokens >= 0, "thinking", "must have a budget of 0 or more")
        for text in (self.opening, self.closing):
            _check(0 < len(text) <= _MAX_MARKER, "thinking", f"a marker has 1 to {_MAX_MARKER} characters")
        ids = self.closing_ids
        _check(0 < len(ids) <= _MAX_MARKER, "thinking", f"its end has 1 to {_MAX_MARKER} tokens")
        _check(0 <= min(ids) and max(ids) < vocab_size, "thinking", f"its end must be of tokens below {vocab_size}")
