"""Readers of the events of an attempt's two calls: where its time went, and the log-probabilities of its prompt."""

from __future__ import annotations

from time import monotonic

from core.rpc import worker_pb2 as pb
from core.types.errors import TransferError
from core.types.prompt_logprobs import PromptLogprobs
from core.types.request import SequenceRequest
from core.types.timeline import RequestPhase, Timeline
from core.wire.prompt_logprob_messages import prompt_logprobs_from_proto


class LeaseSteps:
    """Times of the call to a decode replica, from its start."""

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
        """Note the end of the call, successful or not."""
        self._life.add(RequestPhase.DECODE if self._is_decoding else RequestPhase.WAIT, self._replica, self._at)


class PromptSteps:
    """Times of the call to a prefill replica, from its start."""

    def __init__(self, life: Timeline, replica: str) -> None:
        self._life = life
        self._replica = replica
        self._called = monotonic()

    def first_tokens(self, event: pb.FirstTokens) -> None:
        now, spent = monotonic(), event.spent  # of an older replica: all is zero
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
    """Log-probabilities of a prompt, from one call. Parts of a call that breaks off are of no use:
    the next call sends all of them."""

    def __init__(self, request: SequenceRequest, *, vocab_size: int) -> None:
        self._request = request
        self._vocab_size = vocab_size
        self._num_top = request.num_prompt_logprobs
        self._num_missing = 0 if self._num_top is None else request.num_prompt_tokens - 1
        self._parts: list[PromptLogprobs] = []

    def add(self, message: pb.PromptLogprobs) -> None:
        """Raises TransferError for more than was asked, or for values that no model computes."""
        if self._num_top is None:
            return
        part = prompt_logprobs_from_proto(message, num_top=self._num_top, vocab_size=self._vocab_size)
        self._num_missing -= len(part)
        if self._num_missing < 0:
            raise TransferError(f"request {self._request.id}: got log-probabilities of more tokens than its prompt has")
        self._parts.append(part)

    def whole(self) -> PromptLogprobs | None:
        """Return None where the request asked for none. Raises TransferError where some are missing."""
        if self._num_top is None:
            return None
        if self._num_missing:
            raise TransferError(
                f"request {self._request.id}: the log-probabilities of {self._num_missing} of its tokens are missing"
            )
        return PromptLogprobs.joined(self._parts, num_top=min(self._num_top, self._vocab_size))
