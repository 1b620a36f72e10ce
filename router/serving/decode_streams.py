"""Token streams of an attempt's choices, and live migration of a choice from one decode replica (S) to another (T).

1  router → T   Generate(continues): a lease on the target                    T: reserved(handoff)
2  router → S   Migrate(handoff): the source keeps decoding while it ships    S: moved after n tokens, or not moved
3  the client gets S's tokens up to n from the frames, then T's

A failed migration leaves everything as it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from time import monotonic

from core.rpc import worker_pb2 as pb
from core.types.errors import ClusterError, ReplicaLost
from core.types.handoff import Handoff
from core.types.request import SampledToken, SequenceRequest
from core.types.timeline import RequestPhase
from core.wire.messages import from_message
from router.serving.grpc_worker import WorkerCall
from router.serving.replicas import DecodeStream, Replica, TokenSink
from router.serving.request_state import AttemptTasks, Choices, RequestState
from router.serving.reservations import Reservation, Reservations
from router.telemetry.traffic import Flows

logger = logging.getLogger(__name__)

_MOVE_AGAIN_S = 0.25
_LAST_TOKENS_S = 3.0  # grace for the tokens of an ended call; a replica silent for that long counts as lost anyway

Lease = WorkerCall[pb.GenerateEvent]


class DecodeStreams:
    """Streams of one attempt. If one of them breaks, the attempt's `choices` fail; a failed move changes nothing."""

    def __init__(
        self,
        state: RequestState,
        request: SequenceRequest,
        choices: Choices,
        tasks: AttemptTasks,
        *,
        reserved: Reservation | None,
        reservations: Reservations,
        flows: Flows,
    ) -> None:
        """request: request with which the attempt began."""
        self.num_given = len(request.token_ids)  # tokens of the prompt and of earlier attempts
        self._num_before = len(request.token_ids) - len(state.request.token_ids)  # tokens of earlier attempts
        self._state = state
        self._request = request
        self._choices = choices
        self._tasks = tasks
        self._reserved = reserved  # reservation for all choices on their first replica
        self._reservations = reservations
        self._flows = flows
        self._streams: dict[int, DecodeStream] = {}
        self._one_at_a_time = asyncio.Lock()

    def begin(self, decode: Replica) -> Mapping[int, DecodeStream]:
        """Subscribe to the tokens of all choices on this replica, and return the streams by choice."""
        for i, choice in enumerate(self._request.choices):
            self._streams[choice] = stream = DecodeStream(decode, self._request.stream + i)
            decode.subscribe(stream.key, partial(self._choices.decoded, choice))
        self._tasks.start(self._leave_when_draining(decode))
        return dict(self._streams)

    def close(self) -> None:
        """Unsubscribe from all streams. The attempt's tasks must have ended before."""
        for stream in self._streams.values():
            stream.replica.unsubscribe(stream.key)

    def of(self, choice: int) -> DecodeStream | None:
        return self._streams.get(choice)

    def replicas(self) -> set[str]:
        """Return the replicas on which the choices decode."""
        return {stream.replica.id for stream in self._streams.values()}

    def on(self, replica: Replica) -> list[int]:
        """Return the unfinished choices that decode on this replica."""
        return [choice for choice in self._choices.unfinished if self._streams[choice].replica is replica]

    async def lease_ended(self, leased: Mapping[int, DecodeStream], *, num_frames: int) -> None:
        """Handle the end of the Generate call of the `leased` choices: those neither finished nor moved are lost.

        num_frames: number of frames that contain all their tokens, read or unread; 0: not reported, because the replica
        has an older version.
        """
        replica = next(iter(leased.values())).replica
        if num_frames:
            await replica.has_read(num_frames)
            await self._choices.prefill_done.wait()
        # Without a frame count, or during a move, allow time for the last tokens to arrive.
        if not num_frames or self._one_at_a_time.locked():
            await asyncio.sleep(_LAST_TOKENS_S)
        lost = [choice for choice in self._choices.unfinished if self._streams[choice] is leased.get(choice)]
        if lost:
            self._choices.fail(ReplicaLost(f"{replica.id}: the call ended before its choices {lost} had finished"))

    def only_on(self, replica: Replica) -> int | None:
        """Return the choice of a single-choice request if it is decoding on this replica; None otherwise."""
        choice = self._only_choice()
        return choice if choice is not None and self._streams[choice].replica is replica else None

    def running(self) -> tuple[Replica, SequenceRequest] | None:
        """Return the replica of a single-choice request while it decodes, with the tokens so far; None otherwise."""
        choice = self._only_choice()
        if choice is None:
            return None
        stream = self._streams[choice]
        return stream.replica, self._state.continuation([choice], stream=stream.key)

    @property
    def prefill_replica(self) -> str:
        """Replica that computed the prompt; "" if the decode replica did, or if it is not computed yet."""
        return self._state.route.prefill_replica

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the request is predicted to need."""
        return self._reserved.num_blocks if self._reserved else 0

    @property
    def request(self) -> SequenceRequest:
        """Request with which this attempt began."""
        return self._request

    @property
    def max_tokens(self) -> int:
        """Maximum length of each choice, prompt included."""
        return self._request.num_prompt_tokens + self._request.sampling.max_tokens

    def num_tokens(self) -> int:
        """Count the tokens of the attempt's request, and those that its choices have generated since."""
        choices = self._request.choices
        return self.num_given + self._state.num_tokens(choices) - len(choices) * self._num_before

    def start_move(self, choice: int, target: DecodeStream) -> asyncio.Task[None]:
        """Start moving a choice that has begun to another replica. The end of the attempt cancels the move."""
        return self._tasks.start(self._move(choice, target))

    def _only_choice(self) -> int | None:
        movable = [choice for choice in self._choices.unfinished if self._has_begun(choice)]
        return movable[0] if len(self._streams) == 1 and movable else None

    def _has_begun(self, choice: int) -> bool:
        return len(self._state.tokens[choice]) > self._num_before

    async def _leave_when_draining(self, decode: Replica) -> None:
        """Move all choices off a replica once it drains, one after the other, until none is left."""
        await decode.is_draining.wait()
        while self.on(decode):
            for choice in filter(self._has_begun, self.on(decode)):
                if stream := self._reservations.another_decode(self._state.continuation([choice]), decode.id):
                    await self._move(choice, stream)
            await asyncio.sleep(_MOVE_AGAIN_S)

    async def _move(self, choice: int, target: DecodeStream) -> None:
        async with self._one_at_a_time:
            if choice not in self._state.unfinished:
                return
            source = self._streams[choice]
            move = ChoiceMove(source, target)
            request = self._state.continuation([choice], stream=target.key)
            num_blocks = self._reservations.num_blocks(request)
            reservation = Reservation(target.replica, num_requests=1, num_blocks=num_blocks, num_streams=1)
            num_tokens, began = None, monotonic()
            try:
                num_tokens = await move.run(request)
            finally:
                if num_tokens is None:
                    reservation.end()
            if num_tokens is None:
                return
            self._state.life.add(RequestPhase.MOVE, target.replica.id, began)
            self._flows.add("move", source.replica.id, target.replica.id, move.wire_bytes)
            assert move.lease
            holding = self._hold(move.lease, reservation, {choice: target})
            try:
                await self._choices.wait_for(choice, num_tokens - len(self._state.request.token_ids))
            except asyncio.CancelledError:
                target.replica.unsubscribe(target.key)
                raise
            source.replica.unsubscribe(source.key)
            self._streams[choice] = target
            if choice not in self._state.unfinished:  # stopped during the move, on the source
                holding.cancel()
                return
            if self._reserved and len(self._streams) == 1:
                self._reserved.end()
            self._state.route.decode_replica = target.replica.id
            move.follow(partial(self._choices.decoded, choice))
            self._tasks.start(self._leave_when_draining(target.replica))

    def _hold(self, lease: Lease, reservation: Reservation, leased: Mapping[int, DecodeStream]) -> asyncio.Task[None]:
        """Start a task that holds the lease until the lease or the attempt ends."""

        # A done callback also runs for a task cancelled before its start, unlike a `finally` in the task.
        def release(_: asyncio.Task[None]) -> None:
            reservation.end()
            lease.cancel()

        holding = self._tasks.start(self._until_it_ends(lease, leased))
        holding.add_done_callback(release)
        return holding

    async def _until_it_ends(self, lease: Lease, leased: Mapping[int, DecodeStream]) -> None:
        num_frames, began = 0, monotonic()
        try:
            async for event in lease:
                num_frames = event.finished.frames
        except ClusterError as error:
            return self._choices.fail(error)
        finally:
            self._state.life.add(RequestPhase.DECODE, next(iter(leased.values())).replica.id, began)
        await self.lease_ended(leased, num_frames=num_frames)


class ChoiceMove:
    """Migration of one choice from `source` to `target`. Unless `run` succeeds, the target keeps nothing of it."""

    def __init__(self, source: DecodeStream, target: DecodeStream) -> None:
        self.lease: Lease | None = None  # lease on the target
        self.wire_bytes = 0
        self._source = source
        self._target = target
        self._early: list[list[SampledToken] | ReplicaLost] = []  # target's tokens before `follow`
        self._sink: TokenSink | None = None

    async def run(self, request: SequenceRequest) -> int | None:
        """Migrate the choice. Return its number of tokens at the switch, or None if it stays on the source.

        request: the choice's request, with its tokens so far; the source may already have more.
        After success the tokens come from the target; `follow` sets their sink.
        """
        source, target = self._source.replica, self._target.replica
        has_moved = False
        try:
            target.subscribe(self._target.key, self._take)
            self.lease = target.worker.generate(request, continues=True)
            async for event in self.lease:
                if event.WhichOneof("event") == "reserved":
                    handoff = from_message(Handoff, event.reserved.handoff)
                    reply = await source.worker.migrate(self._source.key, handoff)
                    has_moved = reply.moved
                    if not has_moved:
                        logger.debug("move declined request=%s source=%s: %s", request.id, source.id, reply.reason)
                        return None
                    logger.info(
                        "request=%s moved from=%s to=%s tokens=%d bytes=%d pause_ms=%.1f",
                        request.id,
                        source.id,
                        target.id,
                        reply.num_tokens,
                        reply.wire_bytes,
                        reply.pause_s * 1e3,
                    )
                    self.wire_bytes = reply.wire_bytes
                    return reply.num_tokens
            return None
        except ClusterError as error:
            logger.warning("move failed request=%s: %s", request.id, error)
            return None
        finally:
            if not has_moved:
                target.unsubscribe(self._target.key)
                if self.lease:
                    self.lease.cancel()

    def follow(self, sink: TokenSink) -> None:
        """Pass the target's tokens to `sink` from now on, beginning with those already received."""
        self._sink = sink
        early, self._early = self._early, []
        for tokens in early:
            sink(tokens)

    def _take(self, tokens: list[SampledToken] | ReplicaLost) -> None:
        if self._sink:
            self._sink(tokens)
        else:
            self._early.append(tokens)
