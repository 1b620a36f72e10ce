"""Evening out: running choices leave a decode replica that has many more than another one, KV and all; and guests of
prefill replicas go to decode replicas that have room for them.

A replica that starts, or comes back, has nothing to do while what was there before it decodes slowly in large batches,
and is lost together. New requests alone fill it as slowly as they come.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from core.types.request import Role
from router.routing.revisions import Revisions
from router.serving.decode_streams import DecodeStreams
from router.serving.move import DecodeStream
from router.serving.replica import Replica
from router.serving.replicas import Replicas

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_MIN_GAP = 4  # streams
_MIN_GAP_SHARE = 0.25  # of those on the fuller one: a move gains nothing much where both are about as full


@dataclass(frozen=True)
class Overload:
    """How many streams are on a decode replica."""

    replica: str
    num_streams: int


def next_move(crowds: Sequence[Overload]) -> tuple[str, str] | None:
    """From where to where one stream should go; None where nothing is far from even."""
    if not crowds:
        return None
    fullest = max(crowds, key=lambda crowd: crowd.num_streams)
    emptiest = min(crowds, key=lambda crowd: crowd.num_streams)
    gap = fullest.num_streams - emptiest.num_streams
    is_worth_it = gap >= max(_MIN_GAP, _MIN_GAP_SHARE * fullest.num_streams)
    return (fullest.replica, emptiest.replica) if is_worth_it else None


class Rebalancer:
    """Moves the requests of one router, one at a time. Others may do the same: the gap leaves room for that."""

    def __init__(self, replicas: Replicas, revisions: Revisions, *, running: Collection[DecodeStreams]) -> None:
        self._replicas = replicas
        self._revisions = revisions
        self._running = running

    async def run_forever(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if move := self._start():
                await asyncio.wait({move})

    def _start(self) -> asyncio.Task[None] | None:
        decodes = {replica.id: replica for replica in self._replicas.usable(Role.DECODE)}
        crowds = [Overload(replica.id, replica.load().num_streams) for replica in decodes.values()]
        moves = (next_move(some) for some in self._revisions.apart(crowds, lambda crowd: crowd.replica))
        found = next((move for move in moves if move), None)
        task = self._move_one(decodes[found[0]], decodes[found[1]]) if found else None
        return task or self._accept_local_decode(decodes.values())

    def _accept_local_decode(self, decodes: Iterable[Replica]) -> asyncio.Task[None] | None:
        """Of a prefill replica, where its answer waits for prompts at every step."""
        emptiest_first = sorted(decodes, key=lambda replica: replica.load().num_streams)
        for source in self._replicas.usable(Role.PREFILL):
            for target in emptiest_first if source.promised_streams else ():
                if self._revisions.may_move(source.id, target.id) and (task := self._move_one(source, target)):
                    return task
        return None

    def _move_one(self, source: Replica, target: Replica) -> asyncio.Task[None] | None:
        movable = [answer for answer in self._running if self._may_move(answer, source, target)]
        if not movable:
            return None
        answer = min(movable, key=lambda answer: answer.num_given)  # the least to ship
        choice = answer.only_on(source)
        assert choice is not None
        return answer.start_move(choice, DecodeStream(target, self._replicas.new_streams(1)))

    def _may_move(self, answer: DecodeStreams, source: Replica, target: Replica) -> bool:
        has_room = target.load().has_room_to_decode(num_blocks=answer.num_blocks, num_streams=1)
        return has_room and target.member.understands(answer.request) and answer.only_on(source) is not None
