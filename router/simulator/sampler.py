"""What a simulated step gives: no logits, and tokens that are all alike."""

from __future__ import annotations

from collections.abc import Sequence

from engine.sampling import Chosen, SamplingRow

NO_LOGITS = ()


def repeat_last(logits: tuple[()], rows: Sequence[SamplingRow], positions: Sequence[int] | None, /) -> list[Chosen]:
    """Implements engine.sampling.Sampler."""
    return [(row.tokens[-1], None) for row in rows]
