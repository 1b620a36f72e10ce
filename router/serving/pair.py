"""Where a request is tried, and what it counts on there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.words.handoff import Holder
from router.serving.booking import Booking
from router.serving.replica import Replica


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Where to try. Without a prefill replica the decode replica computes the prompt; without a decode replica the
    first tokens are all that is wanted."""

    prefill: Replica | None
    decode: Replica | None
    prompt: Booking | None  # of the prefill replica's work, until it has computed the prompt
    room: Booking | None  # of the decode replica's blocks, as long as the pair is used
    holder: Holder | None  # from whom whoever computes the prompt may fetch what it lacks of the prefix
    hashes: Sequence[bytes]  # of the prompt's full blocks, as it was weighed

    def release(self) -> None:
        """It is not used any more."""
        for booking in (self.prompt, self.room):
            if booking:
                booking.end()
