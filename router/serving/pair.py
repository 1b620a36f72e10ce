"""Where a request is tried, and the room there that it counts on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.words.handoff import Holder
from router.serving.replicas import Replica


class Promise:
    """Room on a decode replica that a request counts on, from when it is chosen until `end`."""

    def __init__(self, replica: Replica, *, num_blocks: int, num_streams: int) -> None:
        """num_blocks: with the answer that is predicted."""
        self.num_blocks = num_blocks
        self.num_streams = num_streams
        self._replica: Replica | None = None
        self.move(replica)

    def move(self, to: Replica | None) -> None:
        """It counts on another replica now."""
        for replica, sign in ((self._replica, -1), (to, 1)):
            if replica:
                replica.promised_blocks += sign * self.num_blocks
                replica.promised_streams += sign * self.num_streams
        self._replica = to

    def end(self) -> None:
        self.move(None)


@dataclass(frozen=True)
class Pair:
    """Where to try. Without a prefill replica the decode replica computes the prompt; without a decode replica the
    first tokens are all that is wanted."""

    prefill: Replica | None
    decode: Replica | None
    hashes: Sequence[bytes] = ()  # of the prompt's full blocks, as it was weighed
    promise: Promise | None = None  # of the decode replica, as long as the pair is used
    answered: Callable[[], None] = lambda: None  # to be called when the prefill replica has computed the prompt
    holder: Holder | None = None  # from whom the replica that computes the prompt may fetch what it lacks of the prefix
