"""Where each choice of an attempt decodes, and its way from one decode replica to another while its stream goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from time import monotonic

from core.types.errors import ClusterError, ReplicaLost
from core.types.request import SequenceRequest
from core.types.timeline import RequestPhase
from router.serving.choices import AttemptTasks, Choices
from router.serving.flows import Flows
from router.serving.move import ChoiceMove, DecodeStream, Lease
from router.serving.replica import Replica
from router.serving.request_state import RequestState
from router.serving.reservations import Reservation, Reservations

_MOVE_AGAIN_S = 0.25
_LAST_TOKENS_S = 3.0  # for what belongs to a call that has ended; silence of so long is a loss anyway


@dataclass(frozen=True)
class Running:
    """A choice that decodes, with the tokens that it has brought so far."""

    replica: Replica
    request: SequenceRequest


class DecodeStreams:
    """The streams of one attempt. Where one of them breaks, its `choices` fail; a move that fails costs nothing."""

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
        """request: what the attempt began with."""
        self.num_given = len(request.token_ids)  # of the prompt, and of earlier attempts
        self._num_before = len(request.token_ids) - len(state.request.token_ids)  # of each choice
        self._state = state
        self._request = request
        self._choices = choices
        self._tasks = tasks
        self._reserved = reserved  # of all choices, where they began
        self._reservations = reservations
        self._flows = flows
        self._streams: dict[int, DecodeStream] = {}
        self._one_at_a_time = asyncio.Lock()

    def begin(self, decode: Replica) -> Mapping[int, DecodeStream]:
        """From now on the tokens of all choices come from this replica, on these streams."""
        for i, choice in enumerate(self._request.choices):
            self._streams[choice] = stream = DecodeStream(decode, self._request.stream + i)
            decode.subscribe(stream.key, partial(self._choices.decoded, choice))
        self._tasks.start(self._leave_when_draining(decode))
        return dict(self._streams)

    def close(self) -> None:
        """Nothing comes any more. The tasks have ended before."""
        for stream in self._streams.values():
            stream.replica.unsubscribe(stream.key)

    def of(self, choice: int) -> DecodeStream | None:
        return self._streams.get(choice)

    def on(self, replica: Replica) -> list[int]:
        """The unfinished choices that decode there."""
        return [choice for choice in self._choices.unfinished if self._streams[choice].replica is replica]

    async def lease_ended(self, leased: Mapping[int, DecodeStream], *, num_frames: int) -> None:
        """The call has ended for which these choices decode on one replica: those that have not ended there, nor have
        gone elsewhere, are lost.

        num_frames: so many have the last of their tokens, however long ago they came and wait to be read; 0: of an
        older replica, which does not say it.
        """
        replica = next(iter(leased.values())).replica
        if num_frames:
            await replica.has_read(num_frames)
            await self._choices.prefill_spoke.wait()
        if not num_frames or self._one_at_a_time.locked():  # or a move is under way
            await asyncio.sleep(_LAST_TOKENS_S)
        left = [choice for choice in self._choices.unfinished if self._streams[choice] is leased.get(choice)]
        if left:
            self._choices.fail(ReplicaLost(f"{replica.id}: its call ended, and choices {left} had not"))

    def only_on(self, replica: Replica) -> int | None:
        """The one choice of a request that has one, if it has begun and decodes there; None otherwise."""
        choice = self._only_choice()
        return choice if choice is not None and self._streams[choice].replica is replica else None

    def running(self) -> Running | None:
        """The one choice of a request that has one, as long as it decodes."""
        choice = self._only_choice()
        if choice is None:
            return None
        stream = self._streams[choice]
        return Running(stream.replica, self._state.continuation([choice], stream=stream.key))

    @property
    def prefill_replica(self) -> str:
        """Where the prompt was computed; "" on the decode replica itself, or not yet."""
        return self._state.route.prefill_replica

    @property
    def num_blocks(self) -> int:
        """That the request is predicted to need."""
        return self._reserved.num_blocks if self._reserved else 0

    @property
    def request(self) -> SequenceRequest:
        """As this attempt was given it."""
        return self._request

    def num_tokens(self) -> int:
        """What it was given, and what all choices have brought since."""
        choices = self._request.choices
        return self.num_given + self._state.num_tokens(choices) - len(choices) * self._num_before

    def start_move(self, choice: int, target: DecodeStream) -> asyncio.Task[None]:
        """Take a choice that has begun to another replica, if it can be done before the attempt ends."""
        return self._tasks.start(self._move(choice, target))

    def _only_choice(self) -> int | None:
        movable = [choice for choice in self._choices.unfinished if self._has_begun(choice)]
        return movable[0] if len(self._streams) == 1 and movable else None

    def _has_begun(self, choice: int) -> bool:
        return len(self._state.tokens[choice]) > self._num_before

    async def _leave_when_draining(self, decode: Replica) -> None:
        """Take every choice away from a replica that drains, one after the other, as long as some are left there."""
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
            if choice not in self._state.unfinished:  # it was stopped on its way, where it is no more
                holding.cancel()
                return
            if self._reserved and len(self._streams) == 1:
                self._reserved.end()
            self._state.route.decode_replica = target.replica.id
            move.follow(partial(self._choices.decoded, choice))
            self._tasks.start(self._leave_when_draining(target.replica))

    def _hold(self, lease: Lease, reservation: Reservation, leased: Mapping[int, DecodeStream]) -> asyncio.Task[None]:
        """Keep the lease until it ends by itself, or the attempt ends."""

        def release(_: asyncio.Task[None]) -> None:  # also when it is cancelled before it has begun
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
