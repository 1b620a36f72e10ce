"""Limit of the thinking tokens that precede an answer."""

from __future__ import annotations

from dataclasses import dataclass

from core.types.validation import check as _check

_MAX_MARKER = 256  # characters, and also tokens


@dataclass(frozen=True, kw_only=True)
class ThinkingBudget:
    """Thinking budget of every choice of a request.

    The forced tokens are a function of a choice's generated tokens: after `num_tokens` of thinking, `closing_ids`
    follow one after the other.
    """

    num_tokens: int  # between the markers; 0: the closing marker follows at once
    is_open: bool  # True: the prompt ends inside the thinking; False: the answer may start it with `opening`
    opening: str  # marker text, independent of its tokenization
    closing: str
    closing_ids: tuple[int, ...]  # tokens of `closing`

    def check(self, vocab_size: int) -> None:
        """Check the bounds that a step relies on. Raises RequestError that names the field."""
        _check(self.num_tokens >= 0, "thinking", "must have a budget of 0 or more")
        for text in (self.opening, self.closing):
            _check(0 < len(text) <= _MAX_MARKER, "thinking", f"a marker must have 1 to {_MAX_MARKER} characters")
        ids = self.closing_ids
        _check(0 < len(ids) <= _MAX_MARKER, "thinking", f"the closing marker must have 1 to {_MAX_MARKER} tokens")
        _check(
            0 <= min(ids) and max(ids) < vocab_size,
            "thinking",
            f"the closing marker must have token ids below {vocab_size}",
        )
