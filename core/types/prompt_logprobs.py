"""Log-probabilities of a prompt's own tokens, in columns: a long prompt has hundreds of thousands of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# P tokens, K likeliest ones for each

MAX_PROMPT_NUMBERS = 1 << 18  # log-probabilities per request, top tokens included
_PART = 1 << 15  # log-probabilities per message


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of consecutive prompt tokens. The first token of a prompt has none: nothing precedes it.

    Natural-log probabilities under the unmodified distribution, as in core.types.request.TokenLogprob.
    """

    logprobs_P: NDArray[np.float32]  # <= 0; may be -inf
    ranks_P: NDArray[np.int32]  # 1 + number of likelier tokens
    top_ids_PK: NDArray[np.int32]  # likeliest first
    top_logprobs_PK: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.logprobs_P)

    @property
    def num_top(self) -> int:
        return int(self.top_ids_PK.shape[1])

    @classmethod
    def joined(cls, parts: Iterable[PromptLogprobs], *, num_top: int) -> PromptLogprobs:
        """Concatenate parts that all have `num_top` top tokens."""
        floats, ints = np.zeros((0, 1 + num_top), np.float32), np.zeros((0, 1 + num_top), np.int32)
        empty = cls(floats[:, 0], ints[:, 0], ints[:, 1:], floats[:, 1:])
        columns = zip(*(part.columns for part in (empty, *parts)), strict=True)
        return cls(*(np.concatenate(column) for column in columns))

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        """Return the arrays in field order. Each has P rows."""
        return self.logprobs_P, self.ranks_P, self.top_ids_PK, self.top_logprobs_PK

    def parts(self) -> Iterator[PromptLogprobs]:
        """Split into parts that fit into a message, in order; an empty object yields none."""
        size = max(1, _PART // (1 + self.num_top))
        for start in range(0, len(self), size):
            yield PromptLogprobs(*(column[start : start + size] for column in self.columns))
