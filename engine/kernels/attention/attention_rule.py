"""Rule of a layer's attention: the keys that a query sees, and their scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from engine.kernels.language import jit, tl

# H query heads of this rank, M queries, N keys

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, kw_only=True)
class AttentionRule:
    """Rule by which the queries of a layer weigh the keys that they see.

    score = scale q k, then soft_cap tanh(score / soft_cap) if there is a cap; output = softmax(scores) v over the keys
    up to and including the query's own, of its window or chunk.
    """

    scale: float
    # A token attends to itself and to window - 1 tokens before it.
    window: int | None = None
    # A token attends to tokens of its own chunk of positions [n chunk, (n + 1) chunk); excludes `window`.
    chunk: int | None = None
    soft_cap: float | None = None
    # fp32: one more score per head, without a value, in the softmax's denominator (gpt-oss).
    sinks_H: Tensor | None = None

    @property
    def factor(self) -> float:
        """Factor of products of queries and keys, before `capped`. Includes log2(e), for powers of two."""
        return self.scale * _LOG2_E if self.soft_cap is None else 2 * self.scale * _LOG2_E / self.soft_cap

    @property
    def constants(self) -> dict[str, int | float]:
        """Compile-time constants of the kernels."""
        return {"WINDOW": self.window or 0, "CHUNK": self.chunk or 0, "CAP": (self.soft_cap or 0.0) * _LOG2_E}


@jit
def capped(scores: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """Cap scores (M, N): CAP tanh(scores / (2 log2(e)))."""
    return CAP - 2.0 * CAP / (1.0 + tl.exp2(scores))


@jit
def is_in_reach(key: tl.tensor, position: tl.tensor, WINDOW: tl.constexpr, CHUNK: tl.constexpr) -> tl.tensor:
    """Return the mask (M, N) of keys that a query's window or chunk includes. position: (M, 1); key: (1, N)."""
    if WINDOW > 0:
        return key > position - WINDOW
    return key >= position // CHUNK * CHUNK


@jit
def sink_of(sinks: tl.tensor, head: tl.tensor) -> tl.tensor:
    """Return the sinks of heads, as scores of base 2."""
    return tl.load(sinks + head) * 1.4426950408889634
