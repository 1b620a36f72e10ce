"""Copies of what runs: every so many tokens, an idle prefill replica fetches the KV of an answer that is decoded.

A decode replica that is lost takes the KV of its answers along. Whoever goes on has to compute them again, all at once
and while a replacement starts; with copies, the last few tokens of each only. And the next turn of a conversation finds
the answer where its prompt was computed.

A copy is a prompt of which only the prefix is wanted that the decode replica has blocks of: the prefill replica pulls
these, computes nothing, and keeps them in its cache. It is made only where nothing else waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from core.types.errors import ClusterError
from core.types.handoff import PrefixSource
from core.types.request import OFFLINE, Role, Sampling, SequenceRequest
from router.routing.revisions import Revisions
from router.serving.decode_streams import DecodeStreams, Running
from router.serving.replica import Replica
from router.serving.replicas import Replicas

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_COPY_S = 10.0
_AT_ONCE = 4  # copies on their way to one replica
_ONE = Sampling(max_tokens=1, temperature=0.0)


@dataclass(frozen=True)
class _Copied:
    num_tokens: int  # of the prompt and the answer, when the last copy was begun
    prefill: str  # where it is


class Backup:
    """Copies the requests of one router."""

    def __init__(self, replicas: Replicas, revisions: Revisions, *, running: Set[DecodeStreams], every: int) -> None:
        """every: tokens of an answer from one copy to the next."""
        self._replicas = replicas
        self._revisions = revisions
        self._running = running
        self._every = every
        self._copied: WeakKeyDictionary[DecodeStreams, _Copied] = WeakKeyDictionary()
        self._under_way: dict[DecodeStreams, asyncio.Task[None]] = {}

    async def run_forever(self) -> None:
        try:
            while True:
                self._begin_some()
                await asyncio.sleep(_LOOK_S)
        finally:
            for task in self._under_way.values():
                task.cancel()
            await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    def _begin_some(self) -> None:
        """Those that are furthest behind first, a few at once for each idle prefill replica."""
        usable = {replica.id: replica for replica in self._replicas.usable(Role.PREFILL)}
        on_their_way = Counter(self._copied[answer].prefill for answer in self._under_way)
        room = {name: _AT_ONCE - on_their_way[name] for name, replica in usable.items() if _is_idle(replica)}
        for answer in sorted(self._running - self._under_way.keys(), key=self._num_behind, reverse=True):
            if self._num_behind(answer) < self._every:
                break
            home = self._home_of(answer)  # what is there already need not be fetched again
            name = home if home in usable else max(room, key=lambda name: room[name], default="")
            # None: of several choices, or not there yet. Asked last, for it puts all tokens together.
            if room.get(name, 0) > 0 and (running := answer.running()):
                if not self._revisions.meet(name, running.replica.id):
                    continue  # while a deployment is updated, some have no copies
                room[name] -= 1
                self._begin(answer, running, usable[name])

    def _begin(self, answer: DecodeStreams, running: Running, prefill: Replica) -> None:
        self._copied[answer] = _Copied(answer.num_tokens(), prefill.id)  # also if it fails: the next one will do
        task = self._under_way[answer] = asyncio.create_task(_copy(running, prefill))
        task.add_done_callback(lambda _: self._under_way.pop(answer, None))

    def _num_behind(self, answer: DecodeStreams) -> int:
        """Tokens that no prefill replica has: of the answer, and of a prompt that the decode replica has computed."""
        copied = self._copied.get(answer)
        if copied:
            return answer.num_tokens() - copied.num_tokens
        return answer.num_tokens() - (answer.num_given if answer.prefill_replica else 0)

    def _home_of(self, answer: DecodeStreams) -> str:
        """The prefill replica that has the beginning; "" where there is none."""
        copied = self._copied.get(answer)
        return copied.prefill if copied else answer.prefill_replica


async def _copy(running: Running, prefill: Replica) -> None:
    member, request = running.replica.member, running.request
    num_held = (len(request.token_ids) - 1) // member.block_size * member.block_size
    tokens = request.token_ids[: num_held + 1]
    copy = SequenceRequest(
        id=f"{request.id}-copy",
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        sampling=_ONE,
        salt=request.salt,
        adapter=request.adapter,
        priority=OFFLINE,
    )
    prefix_source = PrefixSource(replica=running.replica.id, address=member.address, num_tokens=num_held)
    call = prefill.worker.prefill(copy, prefix_source=prefix_source, fetch_only=True)
    try:
        async with asyncio.timeout(_COPY_S):
            async for _ in call:
                pass
    except ClusterError as error:
        logger.debug("request=%s is not copied: %s", request.id, error)
    except TimeoutError:
        logger.debug("request=%s is not copied: %s took too long", request.id, prefill.id)
    finally:
        call.cancel()


def _is_idle(replica: Replica) -> bool:
    return not (replica.status.queued_tokens or replica.pending_tokens or replica.num_requests)
