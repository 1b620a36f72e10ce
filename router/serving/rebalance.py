"""Rebalancing: running choices move, with their KV, from the fullest to the emptiest decode replica. Answers that
prefill replicas decode locally move to decode replicas with room.

Without it, a replica that starts or returns would idle while the others decode slowly in large batches, because only
new requests would fill it. Also, the loss of a fuller replica affects more answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping

from core.types.request import Role
from router.routing.revisions import Revisions
from router.serving.decode_streams import DecodeStreams
from router.serving.replicas import DecodeStream, Replica, Replicas

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_MIN_GAP = 4  # streams
_MIN_GAP_SHARE = 0.25  # of the fuller replica's streams; below it a move gains little


def next_move(num_streams: Mapping[str, int]) -> tuple[str, str] | None:
    """Return the (source, target) replicas for moving one stream; None if the load is about even.

    num_streams: of one or more decode replicas.
    """
    fullest, emptiest = max(num_streams, key=num_streams.__getitem__), min(num_streams, key=num_streams.__getitem__)
    gap = num_streams[fullest] - num_streams[emptiest]
    return (fullest, emptiest) if gap >= max(_MIN_GAP, _MIN_GAP_SHARE * num_streams[fullest]) else None


class Rebalancer:
    """Mover of one router's choices, one at a time. The minimum gap allows for the moves of other routers."""

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
        groups = self._revisions.group(decodes)
        moves = (next_move({replica: decodes[replica].load().num_streams for replica in group}) for group in groups)
        found = next((move for move in moves if move), None)
        task = self._move_one(decodes[found[0]], decodes[found[1]]) if found else None
        return task or self._accept_local_decode(decodes.values())

    def _accept_local_decode(self, decodes: Iterable[Replica]) -> asyncio.Task[None] | None:
        """Move an answer off a prefill replica, where prompts delay every step of it."""
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
        answer = min(movable, key=lambda answer: answer.num_given)  # least KV to ship
        choice = answer.only_on(source)
        assert choice is not None
        return answer.start_move(choice, DecodeStream(target, self._replicas.new_streams(1)))

    def _may_move(self, answer: DecodeStreams, source: Replica, target: Replica) -> bool:
        has_room = target.load().has_room_to_decode(num_blocks=answer.num_blocks, num_streams=1)
        # A smaller target could not hold the whole answer, and the answer would have to move again.
        holds_all = target.member.max_tokens >= min(source.member.max_decoded_tokens, answer.max_tokens)
        return has_room and holds_all and answer.only_on(source) is not None
