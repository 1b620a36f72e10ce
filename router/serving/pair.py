"""Where a request is tried, and what it counts on there, so that the next decision knows of it before a replica says
so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from core.index.prefix_index import PrefixIndex
from core.types.handoff import PrefixSource
from router.serving.replica import Replica

_TOLD_S = 1.0  # by then the index has heard of a computed prompt's blocks from their replica itself


class Booking:
    """Counts at `replica` from when it is made until `end`, which may be called more than once."""

    def __init__(
        self,
        replica: Replica,
        *,
        prompt_tokens: int = 0,
        num_requests: int = 0,
        num_blocks: int = 0,
        num_streams: int = 0,
    ) -> None:
        """prompt_tokens: that it must compute. num_requests: under way there. num_blocks: with the answer that is
        predicted."""
        self.num_blocks = num_blocks
        self._amounts = (prompt_tokens, num_requests, num_blocks, num_streams)
        self._replica: Replica | None = replica
        replica.book(*self._amounts)

    def end(self) -> None:
        if self._replica:
            self._replica.book(*(-amount for amount in self._amounts))
        self._replica = None


class PromptBooking:
    """A prompt that `replica` is to compute: its share of the queue there, and the blocks that others may count on."""

    def __init__(self, replica: Replica, index: PrefixIndex, hashes: Sequence[bytes], *, num_tokens: int) -> None:
        """hashes: of the prompt's full blocks. num_tokens: that it must compute of it."""
        self._settle = partial(index.settle, replica.id, hashes)
        self._queued = Booking(replica, prompt_tokens=num_tokens)
        self._is_over = False
        index.expect(replica.id, hashes)

    def end(self, *, is_computed: bool = False) -> None:
        """It is computed, or given up. May be called more than once."""
        if self._is_over:
            return
        self._is_over = True
        self._queued.end()
        if is_computed:
            asyncio.get_running_loop().call_later(_TOLD_S, self._settle)
        else:
            self._settle()


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Where to try. Without a prefill replica the decode replica computes the prompt; without a decode replica the
    first tokens are all that is wanted."""

    prefill: Replica | None
    decode: Replica | None
    prompt_booking: PromptBooking  # where the prompt is computed, until it is
    decode_booking: Booking | None  # of the decode replica's blocks, as long as the pair is used
    prefix_source: PrefixSource | None  # from whom whoever computes the prompt may fetch what it lacks of the prefix
    revision: int | None = None  # both are of; None: there is one alone

    def release(self) -> None:
        """It is not used any more."""
        self.prompt_booking.end()
        if self.decode_booking:
            self.decode_booking.end()
