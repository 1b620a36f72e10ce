"""Prompts synthesized from a trace: equal ids give equal tokens, different ids different ones."""

from __future__ import annotations

import numpy as np

from core.trace.trace import TraceRequest

_VOCABULARY = 100  # token ids below this exist in every model; 100^8 different blocks of eight tokens


class TracePrompts:
    """Generator of token ids for a trace's requests. Another `seed` gives other prompts, which miss every cache."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def of(self, request: TraceRequest) -> list[int]:
        size = request.tokens_per_id
        ids = request.ids
        if ids is None:  # unique ids; those of a trace are not negative
            first = -(request.number + 1) << 16
            ids = tuple(range(first, first + -(-request.num_tokens // size)))
        tokens: list[int] = []
        for id in ids:
            tokens += np.random.default_rng((self._seed, abs(id), id < 0)).integers(0, _VOCABULARY, size).tolist()
        return tokens[: request.num_tokens]
