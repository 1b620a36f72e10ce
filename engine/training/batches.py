"""Texts side by side, with what the model has computed of them: what one step of training reads."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from engine.training.answers import OwnAnswer
from engine.training.hidden_states_file import CachedAnswer

# B texts, T tokens of the longest, E hidden_size, N answer tokens

BATCH_TOKENS = 1024  # of texts side by side, padding included
_SHUFFLED = 16  # times as many texts are sorted by length as a batch has


@dataclass(frozen=True)
class TextBatch:
    tokens_BT: Tensor  # int64, padded with 0
    fused_BTE3: Tensor
    last_BTE: Tensor
    row_N: Tensor  # of each token of an answer but a text's first: its text,
    place_N: Tensor  # and the position before it, of which it is the next token

    @property
    def next_N(self) -> Tensor:
        """The tokens of the answers."""
        return self.tokens_BT[self.row_N, self.place_N + 1]


def batch_of(texts: Sequence[CachedAnswer]) -> TextBatch:
    features = [text.features() for text in texts]
    spans = [torch.arange(max(1, text.answer.num_prompt), len(text.answer.tokens)) - 1 for text in texts]
    return TextBatch(
        tokens_BT=pad_sequence([torch.tensor(text.answer.tokens) for text in texts], batch_first=True),
        fused_BTE3=pad_sequence([one.fused_TE3 for one in features], batch_first=True),
        last_BTE=pad_sequence([one.last_TE for one in features], batch_first=True),
        row_N=torch.cat([torch.full_like(span, row) for row, span in enumerate(spans)]),
        place_N=torch.cat(spans),
    )


def batches(texts: Sequence[CachedAnswer], *, seed: str, max_tokens: int = BATCH_TOKENS) -> list[list[CachedAnswer]]:
    """All of them once, in an order of their own for each seed; those of a batch are about as long as each other.

    max_tokens: of a batch."""
    shuffled, order = list(texts), random.Random(seed)
    order.shuffle(shuffled)
    found: list[list[CachedAnswer]] = []
    mean = sum(_length(text.answer) for text in texts) / max(1, len(texts))
    step = max(1, round(_SHUFFLED * max_tokens / max(1.0, mean)))
    for first in range(0, len(shuffled), step):
        group = sorted(shuffled[first : first + step], key=lambda text: _length(text.answer))
        found += _split(group, max_tokens)
    order.shuffle(found)
    return found


def in_order(texts: Sequence[CachedAnswer]) -> Iterator[list[CachedAnswer]]:
    """All of them once, as they are."""
    yield from _split(texts, BATCH_TOKENS)


def _split(texts: Sequence[CachedAnswer], max_tokens: int) -> list[list[CachedAnswer]]:
    found: list[list[CachedAnswer]] = []
    longest = 0
    for text in texts:
        longest = max(longest, _length(text.answer))
        if not found or longest * (len(found[-1]) + 1) > max_tokens:
            found.append([])
            longest = _length(text.answer)
        found[-1].append(text)
    return found


def _length(answer: OwnAnswer) -> int:
    return len(answer.tokens)
