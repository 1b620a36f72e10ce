"""Where each choice of an attempt decodes, and its way from one decode replica to another while its stream goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cluster.words.errors import ClusterError, ReplicaLost
from cluster.words.request import SampledToken, SequenceRequest
from router.generation import RequestRoute
from router.serving.choices import Choices
from router.serving.move import ChoiceMove, Lease, Place, hold
from router.serving.pair import Promise
from router.serving.replicas import Replica

_MOVE_AGAIN_S = 0.25


@dataclass(frozen=True)
class Running:
    """A choice that decodes, with the tokens that it has brought so far."""

    replica: Replica
    request: SequenceRequest


class Places:
    """Of one attempt. What goes wrong where a choice decodes fails its `choices`; a move that fails costs nothing."""

    def __init__(
        self,
        request: SequenceRequest,
        choices: Choices,
        promise: Promise | None,
        *,
        router: str,
        route: RequestRoute,
        next_place: Callable[[], Place | None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        """spawn: makes a task whose failure ends the attempt."""
        self._request = request
        self._choices = choices
        self._router = router
        self._route = route
        self._promise = promise
        self._next_place = next_place
        self._spawn = spawn
        self._places: dict[int, Place] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._one_at_a_time = asyncio.Lock()

    def begin(self, decode: Replica) -> None:
        """From now on the tokens of all choices come from this replica."""
        for i, choice in enumerate(self._request.choices):
            self._places[choice] = place = Place(decode, self._request.stream + i)
            decode.subscribe(place.stream, partial(self._take, choice))
        self._start(self._leave_when_draining(decode))

    async def close(self) -> None:
        """Nothing comes any more: ends what is on its way, and the leases on replicas that choices have moved to."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for place in self._places.values():
            place.replica.unsubscribe(place.stream)

    def of(self, choice: int) -> Place | None:
        return self._places.get(choice)

    def on(self, replica: Replica) -> list[int]:
        """The unfinished choices that decode there."""
        return [choice for choice in self._choices.unfinished if self._places[choice].replica is replica]

    def only_on(self, replica: Replica) -> int | None:
        """The one choice of a request that has one, if it has begun and decodes there; None otherwise."""
        choice = self._only_choice()
        return choice if choice is not None and self._places[choice].replica is replica else None

    def running(self) -> Running | None:
        """The one choice of a request that has one, as long as it decodes."""
        choice = self._only_choice()
        if choice is None:
            return None
        place = self._places[choice]
        return Running(place.replica, self._so_far(choice, place.stream))

    @property
    def prefill_replica(self) -> str:
        """Where the prompt was computed; "" on the decode replica itself, or not yet."""
        return self._route.prefill_replica

    @property
    def num_given(self) -> int:
        """Tokens that the attempt began with: of the prompt, and of earlier attempts."""
        return len(self._request.token_ids)

    @property
    def num_blocks(self) -> int:
        """That the request is predicted to need."""
        return self._promise.num_blocks if self._promise else 0

    def num_tokens(self) -> int:
        """What it was given, and what all choices have brought since."""
        return self.num_given + sum(map(len, self._choices.emitted.values()))

    def start_move(self, choice: int, target: Place) -> asyncio.Task[None]:
        """Take a choice that has begun to another replica, if it can be done before the attempt ends."""
        return self._start(self._move(choice, target))

    def _only_choice(self) -> int | None:
        movable = [choice for choice in self._choices.unfinished if self._choices.emitted[choice]]
        return movable[0] if len(self._places) == 1 and movable else None

    def _movable(self, replica: Replica) -> list[int]:
        return [choice for choice in self.on(replica) if self._choices.emitted[choice]]

    async def _leave_when_draining(self, decode: Replica) -> None:
        """Take every choice away from a replica that drains, one after the other, as long as some are left there."""
        await decode.is_draining.wait()
        while self.on(decode):
            for choice in self._movable(decode):
                if place := self._next_place():
                    await self._move(choice, place)
            await asyncio.sleep(_MOVE_AGAIN_S)

    async def _move(self, choice: int, target: Place) -> None:
        async with self._one_at_a_time:
            if choice not in self._choices.unfinished:
                return
            source = self._places[choice]
            move = ChoiceMove(source, target, router=self._router)
            num_tokens = await move.run(self._so_far(choice, target.stream))
            if num_tokens is None:
                return
            assert move.lease
            self._keep(move.lease, target.replica)
            try:
                await self._choices.wait_for(choice, num_tokens - self.num_given)
            except asyncio.CancelledError:
                target.replica.unsubscribe(target.stream)
                raise
            source.replica.unsubscribe(source.stream)
            self._places[choice] = target
            if self._promise and len(self._places) == 1:
                self._promise.move(target.replica)
            self._route.decode_replica = target.replica.id
            self._route.moves += 1
            move.follow(partial(self._take, choice))
            self._start(self._leave_when_draining(target.replica))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._spawn(work)
        self._tasks.append(task)
        return task

    def _so_far(self, choice: int, stream: int) -> SequenceRequest:
        token_ids = self._request.token_ids + tuple(self._choices.emitted[choice])
        return replace(self._request, token_ids=token_ids, choices=(choice,), stream=stream)

    def _keep(self, lease: Lease, replica: Replica) -> None:
        held = self._start(self._hold(lease, replica))
        held.add_done_callback(lambda _: lease.cancel())  # also when it is cancelled before it has begun

    async def _hold(self, lease: Lease, replica: Replica) -> None:
        replica.num_requests += 1
        try:
            await hold(lease, peer=replica.id)
        except ClusterError as error:
            self._choices.fail(error)
        finally:
            replica.num_requests -= 1

    def _take(self, choice: int, tokens: list[SampledToken] | ReplicaLost) -> None:
        if isinstance(tokens, ReplicaLost):
            self._choices.fail(tokens)
        else:
            self._choices.decoded(choice, tokens)
