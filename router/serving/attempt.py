"""Attempt to serve a request on one pair of replicas.

1  router → D   Generate: the lease                    D: reserved(handoff)
2  router → P   Prefill(handoff)                       P: first tokens, then shipped
3  D → router   tokens 2…n in the frames; also the first ones if D computes the prompt itself
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import replace
from time import monotonic

from core.rpc import worker_pb2 as pb
from core.types.errors import ClusterError, ReplicaLost, TransferError
from core.types.handoff import Handoff, PrefixSource
from core.types.prompt_logprobs import PromptLogprobs
from core.types.request import SequenceRequest
from core.types.timeline import RequestPhase, Timeline
from core.wire.messages import from_message, prompt_logprobs_from_proto, tokens_from_proto
from router.routing.chooser import Culprit
from router.serving.decode_streams import DecodeStreams
from router.serving.replicas import DecodeStream, Replica
from router.serving.request_state import AttemptTasks, Choices, RequestState
from router.serving.reservations import Pair, Reservation, Reservations, may_retry
from router.telemetry.traffic import Flows

_SHIPPED_S = 1.0  # wait for the transfer report, which may follow the tokens decoded from that KV
_STOP_S = 1.0


class Attempt:
    """One try at serving a request on one pair. `state`: the whole request; `request`: the part still to serve.

    `state` gets every token once and in order. `run` returns when all choices have finished. It raises ClusterError
    when the pair fails; earlier tokens stay valid. A prefill replica that fails before it has sent a token is replaced
    by one outside `avoid`, under the same handoff with the next epoch.
    """

    def __init__(
        self,
        state: RequestState,
        request: SequenceRequest,
        pair: Pair,
        *,
        reservations: Reservations,
        flows: Flows,
        vocab_size: int,
        avoid: Set[Culprit],
    ) -> None:
        self._state = state
        self._route = state.route
        self._request = request
        self._pair = pair  # the prefill replica changes if it fails
        self._reservations = reservations
        self._flows = flows
        self._vocab_size = vocab_size
        self._avoid = avoid
        self.culprits: set[Culprit] = set()  # replicas and links to blame
        self._choices = Choices(
            state,
            request.choices,
            has_prefill=pair.prefill is not None,
            max_tokens=pair.decode.member.max_decoded_tokens if pair.decode else sys.maxsize,
            may_hold=reservations.may_hold,
        )
        self._tasks = AttemptTasks(self._choices, request_id=request.id)
        self.streams = DecodeStreams(
            state,
            request,
            self._choices,
            self._tasks,
            reserved=pair.answer,
            reservations=reservations,
            flows=flows,
        )
        self._prefilling: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve the request until all its choices have finished. Raises ClusterError if the pair fails."""
        try:
            if decode := self._pair.decode:
                leased = self.streams.begin(decode)
                self._tasks.start(self._lease(decode, leased))
            else:
                self._tasks.start(self._prefill(None))
            try:
                await self._choices.wait()
            except ClusterError:
                if not self.culprits:  # no call failed, so a token stream did
                    self.culprits |= self.streams.replicas()
                raise
            if self._prefilling and self._choices.is_decoding:
                await asyncio.wait({self._prefilling}, timeout=_SHIPPED_S)
        finally:
            self._pair.prompt.end()
            self._prefilling = None
            try:
                await self._tasks.close()
            finally:  # a client that disconnects may cancel the await above
                self.streams.close()

    async def stop(self, choice: int) -> None:
        """Stop generating for this choice. No more tokens follow."""
        self._choices.finish(choice)
        if self._choices.unfinished and (stream := self.streams.of(choice)):
            with suppress(ClusterError):  # a lost replica generates nothing anyway
                await stream.replica.worker.stop([stream.key], timeout_s=_STOP_S)

    # Lease on D

    async def _lease(self, decode: Replica, leased: Mapping[int, DecodeStream]) -> None:
        prefill_here = self._pair.prefill is None
        request = self._request if prefill_here else replace(self._request, num_prompt_logprobs=None)
        reservation, num_frames = Reservation(decode, num_requests=1), 0
        parts = _PromptParts(request, vocab_size=self._vocab_size)
        steps = _LeaseSteps(self._state.life, decode.id)
        call = decode.worker.generate(
            request,
            prefill_here=prefill_here,
            prefix_source=self._prefix_source_for(decode) if prefill_here else None,
            timeout_s=self._state.remaining_s(),
        )
        try:
            async for event in call:
                match event.WhichOneof("event"):
                    case "reserved":
                        steps.reserved(event.reserved)
                        self._reserved(decode, event.reserved)
                    case "prompt_logprobs":
                        parts.add(event.prompt_logprobs)
                    case "started":
                        self._take_logprobs(parts)
                        steps.started(event.started, prefill_here=prefill_here)
                        self._choices.started(epoch=event.started.epoch)
                        if prefill_here:
                            self._pair.prompt.end(is_computed=True)
                            self._route.fetched_tokens = event.started.fetched_tokens
                            self._note_fetch(decode)
                    case "finished":
                        num_frames = event.finished.frames
        except ClusterError as error:
            if self.streams.on(decode):
                self.culprits.add(self._culprit(decode, error))
                self._choices.fail(error)
            return
        finally:
            steps.ended()
            reservation.end()
            call.cancel()
        await self.streams.lease_ended(leased, num_frames=num_frames)

    def _reserved(self, decode: Replica, reserved: pb.Reserved) -> None:
        self._route.decode_replica = decode.id
        if self._pair.prefill is None:
            self._route.prefill_replica = ""
            self._route.cached_tokens = reserved.cached_tokens
        else:
            self._prefilling = self._tasks.start(self._prefill(from_message(Handoff, reserved.handoff)))

    # Prompt on P

    async def _prefill(self, handoff: Handoff | None) -> None:
        """Compute the prompt on a prefill replica; fail the attempt if none can.

        handoff: destination of the KV; None: only the first tokens are needed.
        """
        failed: set[Culprit] = set()
        while True:
            prefill = self._pair.prefill
            assert prefill
            try:
                return await prefill.unless_lost(self._call_prefill(prefill, handoff))
            except ClusterError as error:
                self._pair.prompt.end()
                failed.add(self._culprit(prefill, error))
                is_retryable = may_retry(error) and not self._choices.has_first
                avoid = self._avoid | failed
                other = (
                    self._reservations.another_prefill(self._request, self._pair, avoid=avoid) if is_retryable else None
                )
                self._pair = other or replace(self._pair, prefill=None)
                if not (other and other.prefill):
                    self.culprits |= failed
                    return self._choices.fail(error)
            handoff = replace(handoff, epoch=handoff.epoch + 1) if handoff else None

    async def _call_prefill(self, prefill: Replica, handoff: Handoff | None) -> None:
        """Compute and ship the prompt on `prefill`. Raises ClusterError if the prompt's KV did not arrive."""
        reservation = Reservation(prefill, num_requests=1)
        parts = _PromptParts(self._request, vocab_size=self._vocab_size)
        steps = _PromptSteps(self._state.life, prefill.id)
        call = prefill.worker.prefill(
            self._request,
            handoff=handoff,
            prefix_source=self._prefix_source_for(prefill),
            timeout_s=self._state.remaining_s(),
        )
        try:
            async for event in call:
                if event.WhichOneof("event") == "prompt_logprobs":
                    parts.add(event.prompt_logprobs)
                elif event.WhichOneof("event") == "first_tokens":
                    self._take_logprobs(parts)
                    steps.first_tokens(event.first_tokens)
                    self._pair.prompt.end(is_computed=True)
                    self._route.prefill_replica = prefill.id
                    self._route.cached_tokens = event.first_tokens.cached_tokens
                    self._route.fetched_tokens = event.first_tokens.fetched_tokens
                    self._note_fetch(prefill)
                    epoch = handoff.epoch if handoff else 0
                    self._choices.first(tokens_from_proto(event.first_tokens.tokens), epoch=epoch)
                elif event.WhichOneof("event") == "shipped":
                    steps.shipped(event.shipped)
                    self._route.blocks_shipped += event.shipped.blocks
                    self._route.wire_bytes += event.shipped.wire_bytes
                    if handoff:
                        self._flows.add("handoff", prefill.id, handoff.replica, event.shipped.wire_bytes)
            if not self._choices.has_first:
                raise ReplicaLost(f"{prefill.id}: the prefill call ended without a token")
        finally:
            reservation.end()
            call.cancel()

    def _culprit(self, called: Replica, error: ClusterError) -> Culprit:
        """Return the replica or link to blame for the error of a call to `called`.

        Missing KV is blamed on the link; but if the decode replica reports it and the prefill replica has sent no
        token, on the prefill replica.
        """
        prefill, decode = self._pair.prefill, self._pair.decode
        if not (isinstance(error, TransferError) and prefill and decode):
            return called.id
        is_silent = called is decode and not self._choices.has_first
        return prefill.id if is_silent else (prefill.id, decode.id)

    def _take_logprobs(self, parts: _PromptParts) -> None:
        """Store the prompt's log-probabilities. Raises TransferError if some are missing."""
        if (logprobs := parts.joined()) is not None:
            self._state.prompt_logprobs = logprobs

    def _note_fetch(self, by: Replica) -> None:
        if (prefix_source := self._prefix_source_for(by)) and (num_tokens := self._route.fetched_tokens):
            self._flows.add("pull", prefix_source.replica, by.id, by.member.cache.shipped_bytes(num_tokens))

    def _prefix_source_for(self, replica: Replica) -> PrefixSource | None:
        prefix_source = self._pair.prefix_source
        return prefix_source if prefix_source and prefix_source.replica != replica.id else None


class _LeaseSteps:
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


class _PromptSteps:
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


class _PromptParts:
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
