"""What the events of an attempt's two calls say of where its time went."""

from __future__ import annotations

from time import monotonic

from core.rpc import worker_pb2 as pb
from core.types.timeline import RequestPhase, Timeline


class LeaseSteps:
    """Of the call to a decode replica, from when it is made."""

    def __init__(self, life: Timeline, replica: str) -> None:
        self._life = life
        self._replica = replica
        self._at = monotonic()  # of the last event
        self._is_decoding = False

    def reserved(self, reserved: pb.Reserved) -> None:
        now = monotonic()
        turn = self._life.add_before(now, self._replica, [(RequestPhase.WAIT, reserved.waited_s)], since=self._at)
        self._life.add(RequestPhase.ROUTE, self._replica, self._at, turn)
        self._at = now

    def started(self, started: pb.Started, *, prefill_here: bool) -> None:
        now, begun = monotonic(), self._at
        if prefill_here:
            spent = started.spent  # of an older replica: all is zero
            parts = [(RequestPhase.FETCH, spent.fetched_s), (RequestPhase.COMPUTE, spent.computed_s)]
            begun = self._life.add_before(now, self._replica, parts, since=self._at)
        # For its turn; or for KV that is on its way.
        self._life.add(RequestPhase.WAIT, self._replica, self._at, begun if prefill_here else now)
        self._at, self._is_decoding = now, True

    def ended(self) -> None:
        """However it has ended."""
        self._life.add(RequestPhase.DECODE if self._is_decoding else RequestPhase.WAIT, self._replica, self._at)


class PromptSteps:
    """Of the call to a prefill replica, from when it is made."""

    def __init__(self, life: Timeline, replica: str) -> None:
        self._life = life
        self._replica = replica
        self._called = monotonic()

    def first_tokens(self, told: pb.FirstTokens) -> None:
        now, spent = monotonic(), told.spent  # of an older replica: all is zero
        parts = [
            (RequestPhase.WAIT, spent.waited_s),
            (RequestPhase.FETCH, spent.fetched_s),
            (RequestPhase.COMPUTE, spent.computed_s),
        ]
        begun = self._life.add_before(now, self._replica, parts, since=self._called)
        self._life.add(RequestPhase.ROUTE, self._replica, self._called, begun)

    def shipped(self, shipped: pb.Shipped) -> None:
        self._life.add_before(monotonic(), self._replica, [(RequestPhase.WIRE, shipped.seconds)], since=self._called)
