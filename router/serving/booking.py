"""What a request counts on at one replica, so that the next choice knows of it before the replica says so."""

from __future__ import annotations

from router.serving.replica import Replica


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
        self._replica: Replica | None = None
        self.move(replica)

    def move(self, to: Replica | None) -> None:
        """It counts at another replica now."""
        for replica, sign in ((self._replica, -1), (to, 1)):
            if replica:
                replica.book(*(sign * amount for amount in self._amounts))
        self._replica = to

    def end(self) -> None:
        self.move(None)
