"""Token masks of one sequence: one enforces a compiled grammar, one a thinking budget."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from core.types.request import ThinkingBudget

# A mask takes about 40 us. One that repeatedly costs ten times as much delays every other row of its steps.
_FREE_S, _S_PER_MASK = 0.5, 0.0005
_FULL = ("too many states", "too many expressions")  # errors of a matcher whose lexer cache is full


@dataclass(eq=False, kw_only=True)
class GrammarMask:
    """Implementation of engine.sampling.params.TokenMask for one append-only sequence. Owned by its step thread."""

    matcher: LLMatcher
    tokens: NDArray[np.uint32]  # bitmask of the model's tokens, without the matcher's end token
    ends: NDArray[np.uint32]  # bitmask of the tokens that may end the sequence where the grammar may end
    # Returns a new matcher when this one is full; None if compiling one is slow.
    rebuild: Callable[[], LLMatcher] | None = None
    failure: str = ""
    num_taken: int = 0  # tokens consumed by the matcher
    cost: _Cost = field(default_factory=lambda: _Cost())  # shared with the forks

    def may_forbid(self, tokens: Sequence[int], start: int, num_in_flight: int) -> bool:
        return True

    def allowed(self, tokens: Sequence[int], start: int) -> NDArray[np.int32]:
        """Return the mask of the next token; all zero if `failure` is set."""
        begin = time.thread_time()
        words = self._allowed(tokens, start)
        if self.rebuild and any(error in self.failure for error in _FULL):
            self.matcher, self.num_taken, self.failure = self.rebuild(), 0, ""
            words = self._allowed(tokens, start)
        self._check(self.cost.is_borne(time.thread_time() - begin), "computing its masks takes too long")
        return words if not self.failure else words * 0

    def only(self, tokens: Sequence[int], start: int) -> int | None:
        """Return the next token if the grammar forces one. Faster than `allowed`: about 5 us."""
        begin = time.thread_time()
        found = self._only(tokens, start)
        is_borne = self.cost.is_borne(time.thread_time() - begin, num_masks=int(found is not None))
        self._check(is_borne, "computing its masks takes too long")
        return found if not self.failure else None

    def take(self, tokens: Sequence[int], start: int) -> None:
        """Consume those of tokens[start:] that were not consumed before."""
        new = list(tokens[start + self.num_taken :])
        if new:
            self.matcher.consume_tokens(new)
            self.num_taken += len(new)
            self._check(not self.matcher.is_error(), "")

    def fork(self) -> GrammarMask:
        """Return a copy for another sequence with the same tokens so far."""
        return replace(self, matcher=self.matcher.deep_copy())

    def _allowed(self, tokens: Sequence[int], start: int) -> NDArray[np.int32]:
        words: NDArray[np.int32] = np.zeros(len(self.ends), dtype=np.int32)
        if not self.failure:
            self.take(tokens, start)
        if not self.failure:
            self._fill(words)
        return words

    def _only(self, tokens: Sequence[int], start: int) -> int | None:
        """Return the forced token. Forced bytes may have several tokenizations, so the mask must have a single bit."""
        if not self.failure:
            self.take(tokens, start)
        is_forced = not self.failure and (self.matcher.compute_ff_tokens() or self.matcher.is_stopped())
        self._check(not self.matcher.is_error(), "")
        if self.failure or not is_forced:
            return None
        words = np.zeros(len(self.ends), dtype=np.int32)
        self._fill(words)
        places = np.flatnonzero(words)
        if len(places) != 1 or (bits := int(words.view(np.uint32)[places[0]])) & (bits - 1):
            return None
        return int(places[0]) * 32 + bits.bit_length() - 1

    def _fill(self, words: NDArray[np.int32]) -> None:
        fill_next_token_bitmask(self.matcher, words.reshape(1, -1))
        bits = words.view(np.uint32)
        bits &= self.tokens
        if self.matcher.is_accepting():
            bits |= self.ends
        self._check(bool(bits.any()), "nothing fits")

    def _check(self, is_met: bool, why: str) -> None:
        if not is_met and not self.failure:
            error = self.matcher.get_error().partition("\n")[0]
            self.failure = f"the grammar allows no further token: {error or why}"


@dataclass(slots=True)
class _Cost:
    """Thread time spent on the masks of one request."""

    spent_s: float = 0.0
    num_masks: int = 0

    def is_borne(self, more_s: float, num_masks: int = 1) -> bool:
        """Add a cost. Returns False if the total delays the other rows of its steps too much."""
        self.spent_s += more_s
        self.num_masks += num_masks
        return self.spent_s < _FREE_S + _S_PER_MASK * self.num_masks


def bits_of(token_ids: Iterable[int], vocab_size: int) -> NDArray[np.uint32]:
    """Return a bitmask of the vocabulary, 32 tokens per word, lowest bit first; other ids are ignored."""
    words = np.zeros((vocab_size + 31) // 32, dtype=np.uint32)
    for token_id in token_ids:
        if 0 <= token_id < vocab_size:
            words[token_id >> 5] |= np.uint32(1 << (token_id & 31))
    return words


@dataclass(eq=False)
class ThinkingMask:
    """Implementation of engine.sampling.params.TokenMask for one append-only sequence, around the mask of its grammar.
    Owned by its step thread.

    Finds the thinking as frontend.parsers.thinking does in text: it starts after the token that completes the opening
    marker and ends with the token that completes the closing marker. The state depends only on the tokens so far, so a
    migrated or retried sequence continues unchanged.
    """

    budget: ThinkingBudget
    bytes_of: Callable[[int], bytes]  # bytes of a token
    vocab_size: int  # bits of a mask
    grammar: GrammarMask | None = None  # of the whole output, thinking included

    def __post_init__(self) -> None:
        self._num_seen = 0  # tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # text that may contain the start of a marker
        self._begin: int | None = 0 if self.budget.is_open else None  # index of the first thinking token
        self._is_over = False  # the thinking ended, or there is none
        self._num_late = 0  # tokens beyond the budget that complete a character

    @property
    def failure(self) -> str:
        return self.grammar.failure if self.grammar else ""

    def may_forbid(self, tokens: Sequence[int], start: int, num_in_flight: int) -> bool:
        """Return whether a mask is needed. Without a grammar, only steps near the end of the thinking need one; all
        others may be scheduled asynchronously."""
        if self.grammar is not None:
            return True
        self.take(tokens, start)
        if self._is_over:
            return False
        # The earliest position at which the thinking may begin.
        begin = self._num_seen + 1 if self._begin is None else self._begin
        return self._num_seen + num_in_flight >= begin + self.budget.num_tokens

    def allowed(self, tokens: Sequence[int], start: int) -> NDArray[np.int32]:
        forced = self._forced(tokens, start)
        if forced is None and self.grammar is not None:
            return self.grammar.allowed(tokens, start)
        words: NDArray[np.int32] = np.full((self.vocab_size + 31) // 32, -1, dtype=np.int32)
        if forced is not None:
            words[:] = 0
            words.view(np.uint32)[forced >> 5] = 1 << (forced & 31)
        return words

    def only(self, tokens: Sequence[int], start: int) -> int | None:
        forced = self._forced(tokens, start)
        if forced is None and self.grammar is not None:
            return self.grammar.only(tokens, start)
        return forced

    def take(self, tokens: Sequence[int], start: int) -> None:
        """Consume those of tokens[start:] that were not consumed before."""
        num_tokens = len(tokens) - start
        while self._num_seen < num_tokens and not self._is_over:
            self._held += self._decoder.decode(self.bytes_of(tokens[start + self._num_seen]))
            self._num_seen += 1
            if self._begin is None:
                self._look_for_opening()
            if self._begin is not None:
                self._look_for_closing(self._begin)
        self._num_seen = num_tokens

    def fork(self) -> ThinkingMask:
        """Return a copy that reads all generated tokens again; at a fork there are hardly any."""
        return replace(self, grammar=self.grammar.fork() if self.grammar else None)

    def _forced(self, tokens: Sequence[int], start: int) -> int | None:
        """Return the next token if it belongs to the forced end of the thinking."""
        self.take(tokens, start)
        if self._is_over or self._begin is None:
            return None
        number = self._num_over(self._begin)
        return self.budget.closing_ids[number] if number >= 0 else None

    def _look_for_opening(self) -> None:
        self._held = self._held.lstrip()
        opening = self.budget.opening
        if self._held.startswith(opening):
            self._begin, self._held = self._num_seen, self._held.removeprefix(opening)
        elif not opening.startswith(self._held):
            self._is_over = True

    def _look_for_closing(self, begin: int) -> None:
        closing = self.budget.closing
        self._is_over = closing in self._held or self._num_over(begin) >= len(self.budget.closing_ids)
        self._held = self._held[1 - len(closing) :] if len(closing) > 1 else ""
        # A grammar would reject the end within a multi-token character, which takes up to 3 more tokens.
        if self.grammar and self._num_over(begin) == 0 and self._decoder.getstate()[0]:
            self._num_late += 1

    def _num_over(self, begin: int) -> int:
        """Return the number of tokens beyond the budget; negative while the budget lasts."""
        return self._num_seen - begin - self.budget.num_tokens - self._num_late
