"""The tokens that heads learn to say: the most frequent of the model's answers. Guessing a rare one is worth little,
and every row of a projection costs each guess some time."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.training.answers import OwnAnswer

_SHARE = 0.97  # of the tokens of answers, that are to be in it
_LEAST = 1024  # tokens
_EVEN = 64  # rows: a multiple of it is multiplied without a remainder


@dataclass(frozen=True)
class DraftVocabulary:
    """Draft ids 0 and on, in the order of the model's ids."""

    ids_V: Tensor  # int64, the model's id of each draft id, ascending
    vocab_size: int  # the model's
    share: float  # of the answers' tokens that are in it

    @classmethod
    def of(cls, answers: Iterable[OwnAnswer], vocab_size: int) -> DraftVocabulary:
        """The most frequent tokens of answers; the model's lowest ids, mostly special ones, are filled up with."""
        counts = Counter(token for answer in answers for token in answer.tokens[answer.num_prompt :])
        ranked = sorted(counts, key=lambda token: (-counts[token], token))
        sums = list(accumulate(counts[token] for token in ranked))
        needed = bisect_left(sums, _SHARE * counts.total()) + 1
        size = min(-(-max(needed, _LEAST) // _EVEN) * _EVEN, vocab_size // _EVEN * _EVEN or vocab_size)
        ranked = ranked[:size]
        known = set(ranked)
        ranked += [token for token in range(vocab_size) if token not in known][: size - len(ranked)]
        share = sum(counts[token] for token in ranked) / max(1, counts.total())
        return cls(torch.tensor(sorted(ranked)), vocab_size, share)

    @property
    def draft_ids(self) -> Tensor:
        """(model's vocabulary,) int64: the draft id of each token, -1 where it has none."""
        found = torch.full((self.vocab_size,), -1)
        found[self.ids_V] = torch.arange(len(self.ids_V))
        return found
