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


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of consecutive prompt tokens. The first token of a prompt has none: nothing precedes it.

    Natural-log probabilities under the unmodified distribution, as core.types.request.TokenLogprob's.
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
    def of(
        cls,
        logprobs: NDArray[np.float32],
        ranks: NDArray[np.int32],
        top_ids: NDArray[np.int32],
        top_logprobs: NDArray[np.float32],
    ) -> PromptLogprobs:
        """Build from arrays in the order of `columns`."""
        return cls(logprobs_P=logprobs, ranks_P=ranks, top_ids_PK=top_ids, top_logprobs_PK=top_logprobs)

    @classmethod
    def none(cls, num_top: int) -> PromptLogprobs:
        """Return an empty object with `num_top` columns of top tokens."""
        one, several = np.zeros(0), np.zeros((0, num_top))
        return cls(
            logprobs_P=one.astype(np.float32),
            ranks_P=one.astype(np.int32),
            top_ids_PK=several.astype(np.int32),
            top_logprobs_PK=several.astype(np.float32),
        )

    @classmethod
    def joined(cls, parts: Iterable[PromptLogprobs], *, num_top: int) -> PromptLogprobs:
        """Concatenate parts that all have `num_top` top tokens."""
        columns = zip(*(part.columns for part in (cls.none(num_top), *parts)), strict=True)
        return cls.of(*(np.concatenate(column) for column in columns))

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        """Return the arrays in field order. Each has P rows."""
        return self.logprobs_P, self.ranks_P, self.top_ids_PK, self.top_logprobs_PK

    def parts(self) -> Iterator[PromptLogprobs]:
        """Split into parts that fit into a message, in order; an empty object yields none."""
        size = max(1, _PART // (1 + self.num_top))
        for start in range(0, len(self), size):
            yield self.of(*(column[start : start + size] for column in self.columns))
