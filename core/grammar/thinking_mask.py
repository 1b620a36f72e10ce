"""Token mask that limits the thinking of an answer, and then forces its closing marker."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from core.grammar.mask import GrammarMask
from core.types.thinking_budget import ThinkingBudget

_NEVER = 1 << 62


class ThinkingMask:
    """Implementation of engine.sampling.params.TokenMask for one append-only sequence, around the mask of its grammar.
    Owned by its step thread.

    Its state is a function of the tokens so far, so a migrated or retried sequence continues alike.
    """

    def __init__(
        self,
        budget: ThinkingBudget,
        *,
        bytes_of: Callable[[int], bytes],
        vocab_size: int,
        grammar: GrammarMask | None = None,
    ) -> None:
        """bytes_of: bytes of a token. vocab_size: bits of a mask. grammar: of the whole output, thinking included."""
        self._budget = budget
        self._bytes_of = bytes_of
        self._vocab_size = vocab_size
        self._grammar = grammar
        self._thinking = _Thinking(budget, bytes_of, finishes_characters=grammar is not None)

    @property
    def failure(self) -> str:
        return self._grammar.failure if self._grammar else ""

    def may_forbid(self, tokens: Sequence[int], start: int, num_in_flight: int) -> bool:
        """Return whether a mask is needed. Without a grammar, only near the end of the thinking; other steps may be
        scheduled asynchronously."""
        if self._grammar is not None:
            return True
        self._thinking.take(tokens, start)
        return self._thinking.num_seen + num_in_flight >= self._thinking.earliest_end

    def allowed(self, tokens: Sequence[int], start: int) -> NDArray[np.int32]:
        forced = self._forced(tokens, start)
        if forced is None and self._grammar is not None:
            return self._grammar.allowed(tokens, start)
        words: NDArray[np.int32] = np.full((self._vocab_size + 31) // 32, -1, dtype=np.int32)
        if forced is not None:
            words[:] = 0
            words.view(np.uint32)[forced >> 5] = 1 << (forced & 31)
        return words

    def only(self, tokens: Sequence[int], start: int) -> int | None:
        forced = self._forced(tokens, start)
        if forced is None and self._grammar is not None:
            return self._grammar.only(tokens, start)
        return forced

    def take(self, tokens: Sequence[int], start: int) -> None:
        """Consume the new tokens of tokens[start:]."""
        self._thinking.take(tokens, start)

    def fork(self) -> ThinkingMask:
        """Return a copy. Its thinking parser starts over and reads the tokens again; at a fork there are hardly any."""
        grammar = self._grammar.fork() if self._grammar else None
        return ThinkingMask(self._budget, bytes_of=self._bytes_of, vocab_size=self._vocab_size, grammar=grammar)

    def _forced(self, tokens: Sequence[int], start: int) -> int | None:
        self._thinking.take(tokens, start)
        return self._thinking.forced


class _Thinking:
    """Parser of the thinking part, equivalent to frontend.parsers.thinking on text: thinking starts after the token
    that completes the opening marker and ends with the one that completes the closing marker."""

    def __init__(self, budget: ThinkingBudget, bytes_of: Callable[[int], bytes], *, finishes_characters: bool) -> None:
        """finishes_characters: never end within a multi-token character, which takes up to 3 more tokens. Needed with a
        grammar, which would reject the incomplete character."""
        self.num_seen = 0
        self._budget = budget
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # text that may contain the start of a marker
        self._begin: int | None = 0 if budget.is_open else None  # index of the first thinking token
        self._is_over = False  # the thinking ended, or there is none
        self._finishes_characters = finishes_characters
        self._num_late = 0  # tokens beyond the budget that complete a character

    def take(self, tokens: Sequence[int], start: int) -> None:
        """Consume the new tokens of tokens[start:]."""
        num_tokens = len(tokens) - start
        while self.num_seen < num_tokens and not self._is_over:
            self._held += self._decoder.decode(self._bytes_of(tokens[start + self.num_seen]))
            self.num_seen += 1
            if self._begin is None:
                self._look_for_opening()
            if self._begin is not None:
                self._look_for_closing(self._begin)
                self._num_late += self._finishes_characters and self._is_cut(self._begin)
        self.num_seen = num_tokens

    @property
    def forced(self) -> int | None:
        """Next token if it belongs to the forced end of the thinking."""
        if self._is_over or self._begin is None:
            return None
        number = self._num_over(self._begin)
        return self._budget.closing_ids[number] if number >= 0 else None

    @property
    def earliest_end(self) -> int:
        """Minimum number of generated tokens at which one is forced."""
        if self._is_over:
            return _NEVER
        begin = self.num_seen + 1 if self._begin is None else self._begin
        return begin + self._budget.num_tokens

    def _look_for_opening(self) -> None:
        self._held = self._held.lstrip()
        opening = self._budget.opening
        if self._held.startswith(opening):
            self._begin, self._held = self.num_seen, self._held.removeprefix(opening)
        elif not opening.startswith(self._held):
            self._is_over = True

    def _look_for_closing(self, begin: int) -> None:
        closing = self._budget.closing
        self._is_over = closing in self._held or self._num_over(begin) >= len(self._budget.closing_ids)
        self._held = self._held[1 - len(closing) :] if len(closing) > 1 else ""

    def _is_cut(self, begin: int) -> bool:
        """Return whether the thinking would end in the middle of a character."""
        return self._num_over(begin) == 0 and bool(self._decoder.getstate()[0])

    def _num_over(self, begin: int) -> int:
        """Return the number of tokens beyond the budget; negative while the budget lasts."""
        return self.num_seen - begin - self._budget.num_tokens - self._num_late
