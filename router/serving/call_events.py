"""Readers of the events of an attempt's two calls: phase times, and the log-probabilities of the prompt."""

from __future__ import annotations

from time import monotonic

from core.rpc import worker_pb2 as pb
from core.types.errors import TransferError
from core.types.prompt_logprobs import PromptLogprobs
from core.types.request import SequenceRequest
from core.types.timeline import RequestPhase, Timeline
from core.wire.prompt_logprob_messages import prompt_logprobs_from_proto


class LeaseSteps:
    """Phase times of the call to a decode replica."""

    def __init__(self, life: Timeline, replica: str) -> None:
        self._life = life
        self._replica = replica
        self._at = monotonic()  # time of the last event
        self._is_decoding = False

    def reserved(self, reserved: pb.Reserved) -> None:
        now = monotonic()
        turn = self._life.add_before(now, self._replica, [(RequestPhase.WAIT, reserved.waited_s)], since=self._at)
        self._life.add(RequestPhase.ROUTE, self._replica, self._at, turn)
        self._at = now

    def started(self, started: pb.Started, *, prefill_here: bool) -> None:
        now, begun = monotonic(), self._at
        if prefill_here:
            spent = started.spent  # all zero from a replica of an older version
            parts = [(RequestPhase.FETCH, spent.fetched_s), (RequestPhase.COMPUTE, spent.computed_s)]
            begun = self._life.add_before(now, self._replica, parts, since=self._at)
        # With a local prefill this is the wait for its turn, otherwise the wait for the KV in transfer.
        self._life.add(RequestPhase.WAIT, self._replica, self._at, begun if prefill_here else now)
        self._at, self._is_decoding = now, True

    def ended(self) -> None:
        """Record the end of the call, successful or not."""
        self._life.add(RequestPhase.DECODE if self._is_decoding else RequestPhase.WAIT, self._replica, self._at)


class PromptSteps:
    """Phase times of the call to a prefill replica."""

    def __init__(self, life: Timeline, replica: str) -> None:
        self._life = life
        self._replica = replica
        self._called = monotonic()

    def first_tokens(self, event: pb.FirstTokens) -> None:
        now, spent = monotonic(), event.spent  # all zero from a replica of an older version
        parts = [
            (RequestPhase.WAIT, spent.waited_s),
            (RequestPhase.FETCH, spent.fetched_s),
            (RequestPhase.COMPUTE, spent.computed_s),
        ]
        begun = self._life.add_before(now, self._replica, parts, since=self._called)
        self._life.add(RequestPhase.ROUTE, self._replica, self._called, begun)

    def shipped(self, shipped: pb.Shipped) -> None:
        self._life.add_before(monotonic(), self._replica, [(RequestPhase.WIRE, shipped.seconds)], since=self._called)


class PromptParts:
    """Assembly of a prompt's log-probabilities from the parts of one call.

    Parts of a broken call are discarded: the next call sends all of them again.
    """

    def __init__(self, request: SequenceRequest, *, vocab_size: int) -> None:
        self._request = request
        self._vocab_size = vocab_size
        self._num_top = request.num_prompt_logprobs
        self._num_missing = 0 if self._num_top is None else request.num_prompt_tokens - 1
        self._parts: list[PromptLogprobs] = []

    def add(self, message: pb.PromptLogprobs) -> None:
        """Add a part. Raises TransferError for more tokens than the prompt has, or for implausible values."""
        if self._num_top is None:
            return
        part = prompt_logprobs_from_proto(message, num_top=self._num_top, vocab_size=self._vocab_size)
        self._num_missing -= len(part)
        if self._num_missing < 0:
            raise TransferError(f"request {self._request.id}: received log-probabilities of more tokens than requested")
        self._parts.append(part)

    def joined(self) -> PromptLogprobs | None:
        """Return the joined parts; None if the request asked for none. Raises TransferError if some are missing."""
        if self._num_top is None:
            return None
        if self._num_missing:
            raise TransferError(
                f"request {self._request.id}: the log-probabilities of {self._num_missing} prompt tokens are missing"
            )
        return PromptLogprobs.joined(self._parts, num_top=min(self._num_top, self._vocab_size))
