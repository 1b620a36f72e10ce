"""Which tokens may follow those of one sequence, by a compiled grammar."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

# A mask takes some 40 us. What costs a hundred times as much, again and again, holds up every other row of its steps.
_FREE_S, _S_PER_MASK = 0.5, 0.005


class GrammarMask:
    """Implements engine.sampling.TokenMask for one sequence, whose tokens only ever grow. Owned by who steps it."""

    def __init__(self, matcher: LLMatcher, *, tokens: NDArray[np.uint32], ends: NDArray[np.uint32]) -> None:
        """tokens: bits of what the model has, without the matcher's own end. ends: of what may end the sequence where
        the grammar may end."""
        self.failure = ""
        self._matcher = matcher
        self._tokens = tokens
        self._ends = ends
        self._num_taken = 0  # tokens that the matcher has seen
        self._spent_s = 0.0  # of this thread's time
        self._num_masks = 0

    def allowed(self, tokens: Sequence[int], start: int) -> NDArray[np.int32]:
        """None at all once `failure` says why."""
        words: NDArray[np.int32] = np.zeros(len(self._ends), dtype=np.int32)
        if self.failure:
            return words
        begin = time.thread_time()
        self.take(tokens, start)
        if not self.failure:
            self._fill(words)
        self._spent_s += time.thread_time() - begin
        self._num_masks += 1
        is_quick = self._spent_s < _FREE_S + _S_PER_MASK * self._num_masks
        self._check(is_quick, "following it takes too long")
        return words if not self.failure else words * 0

    def take(self, tokens: Sequence[int], start: int) -> None:
        """See what is new of tokens[start:]."""
        new = list(tokens[start + self._num_taken :])
        if new:
            self._matcher.consume_tokens(new)
            self._num_taken += len(new)
            self._check(not self._matcher.is_error(), "")

    def fork(self) -> GrammarMask:
        """For another sequence, with the same tokens so far."""
        twin = GrammarMask(self._matcher.deep_copy(), tokens=self._tokens, ends=self._ends)
        twin.failure, twin._num_taken = self.failure, self._num_taken
        return twin

    def _fill(self, words: NDArray[np.int32]) -> None:
        fill_next_token_bitmask(self._matcher, words.reshape(1, -1))
        bits = words.view(np.uint32)
        bits &= self._tokens
        if self._matcher.is_accepting():
            bits |= self._ends
        self._check(bool(bits.any()), "nothing fits")

    def _check(self, is_met: bool, why: str) -> None:
        if not is_met and not self.failure:
            said = self._matcher.get_error().partition("\n")[0]
            self.failure = f"the grammar cannot be followed any further: {said or why}"


def bits_of(token_ids: Iterable[int], vocab_size: int) -> NDArray[np.uint32]:
    """A bit for each token of the vocabulary, 32 in a word, the lowest first; those beyond it are left out."""
    words = np.zeros((vocab_size + 31) // 32, dtype=np.uint32)
    for token_id in token_ids:
        if 0 <= token_id < vocab_size:
            words[token_id >> 5] |= np.uint32(1 << (token_id & 31))
    return words
