"""What one tenant may have of the decode replicas while there are others. Pure.

The dynamic thresholds of Choudhury and Hahne (1998), for buffers: a tenant has no more than a share of what the others
leave. At three quarters, one that is alone leaves a quarter; k that take all they may leave one part in 1 + 3k, so that
whoever comes next need not wait for any of them to end. A single choice of one who has nothing is let in as long as
there is any place.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Places:
    """On decode replicas, held or free."""

    num_streams: int
    num_blocks: int

    def plus(self, other: Places) -> Places:
        return Places(self.num_streams + other.num_streams, self.num_blocks + other.num_blocks)

    def less(self, other: Places) -> Places:
        return Places(self.num_streams - other.num_streams, self.num_blocks - other.num_blocks)


NO_PLACES = Places(0, 0)


def is_within_share(own: Places, more: Places, free: Places, *, share: float, is_on_its_way: bool = False) -> bool:
    """Whether a tenant that has `own` may have `more` beside that, where `free` is left by all.

    Who has nothing waits for room alone. What needs more blocks than a share could be does not wait for what others of
    its tenant have, or it would never come in where these keep coming; but one at a time. is_on_its_way: something of
    `own` has no replica yet.
    """
    if not own.num_streams:
        return True
    has_streams = own.num_streams + more.num_streams <= share * (own.num_streams + free.num_streams)
    most_blocks = share * (own.num_blocks + free.num_blocks)
    return has_streams and (
        own.num_blocks + more.num_blocks <= most_blocks or (more.num_blocks > most_blocks and not is_on_its_way)
    )


def most_choices(num_places: int, *, share: float) -> int:
    """Of one request, on replicas that run so many together."""
    return max(1, int(share * num_places))
