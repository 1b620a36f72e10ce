"""Backup of running answers: every few tokens, an idle prefill replica fetches the KV of an answer.

A lost decode replica loses the KV of its answers. Without copies, all of them must be recomputed at once, while a
replacement starts; with copies, only the last few tokens of each. Also, the next turn of a conversation finds the
answer cached on the replica that computed its prompt.

A copy is a fetch-only prefill request for the full blocks of the decode replica: the prefill replica fetches these,
computes nothing, and caches them. Copies are made only while the prefill replica is idle.
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
from router.serving.decode_streams import DecodeStreams
from router.serving.replicas import Replica, Replicas

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_COPY_S = 10.0
_AT_ONCE = 4  # concurrent copies to one replica
_ONE = Sampling(max_tokens=1, temperature=0.0)


@dataclass(frozen=True)
class _Copied:
    num_tokens: int  # length of prompt and answer when the last copy began
    prefill: str  # prefill replica that holds the copy


class Backup:
    """Periodic copying of the running answers of one router."""

    def __init__(self, replicas: Replicas, revisions: Revisions, *, running: Set[DecodeStreams], every: int) -> None:
        """every: number of tokens between two copies of an answer."""
        self._replicas = replicas
        self._revisions = revisions
        self._running = running
        self._every = every
        self._copied: WeakKeyDictionary[DecodeStreams, _Copied] = WeakKeyDictionary()
        self._copies: dict[DecodeStreams, asyncio.Task[None]] = {}

    async def run_forever(self) -> None:
        try:
            while True:
                self._start_copies()
                await asyncio.sleep(_LOOK_S)
        finally:
            for task in self._copies.values():
                task.cancel()
            await asyncio.gather(*self._copies.values(), return_exceptions=True)

    def _start_copies(self) -> None:
        """Start copies, furthest behind first, up to _AT_ONCE for each idle prefill replica."""
        usable = {replica.id: replica for replica in self._replicas.usable(Role.PREFILL)}
        in_flight = Counter(self._copied[answer].prefill for answer in self._copies)
        room = {name: _AT_ONCE - in_flight[name] for name, replica in usable.items() if _is_idle(replica)}
        for answer in sorted(self._running - self._copies.keys(), key=self._num_behind, reverse=True):
            if self._num_behind(answer) < self._every:
                break
            large = [name for name, replica in usable.items() if answer.num_tokens() <= replica.member.max_tokens]
            # The replica that computed the prompt holds most of the blocks already.
            home = self._home_of(answer)
            name = home if home in large else max(large, key=lambda name: room.get(name, 0), default="")
            # `running` concatenates all tokens, so call it last. It returns None unless one choice decodes.
            if room.get(name, 0) > 0 and (running := answer.running()):
                decode, request = running
                if not self._revisions.in_one_revision(name, decode.id):
                    continue  # during an update, some answers have no copy
                room[name] -= 1
                self._begin(answer, request, decode, usable[name])

    def _begin(self, answer: DecodeStreams, request: SequenceRequest, decode: Replica, prefill: Replica) -> None:
        # Recorded before the copy succeeds: if it fails, the next one covers its tokens.
        self._copied[answer] = _Copied(answer.num_tokens(), prefill.id)
        task = self._copies[answer] = asyncio.create_task(_copy(request, decode, prefill))
        task.add_done_callback(lambda _: self._copies.pop(answer, None))

    def _num_behind(self, answer: DecodeStreams) -> int:
        """Count the tokens that no prefill replica has, including a prompt computed by the decode replica."""
        copied = self._copied.get(answer)
        if copied:
            return answer.num_tokens() - copied.num_tokens
        return answer.num_tokens() - (answer.num_given if answer.prefill_replica else 0)

    def _home_of(self, answer: DecodeStreams) -> str:
        """Return the prefill replica with a copy of the answer, else the one that computed its prompt; "" if none."""
        copied = self._copied.get(answer)
        return copied.prefill if copied else answer.prefill_replica


async def _copy(request: SequenceRequest, decode: Replica, prefill: Replica) -> None:
    member = decode.member
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
    prefix_source = PrefixSource(replica=decode.id, address=member.address, num_tokens=num_held)
    call = prefill.worker.prefill(copy, prefix_source=prefix_source, fetch_only=True)
    try:
        async with asyncio.timeout(_COPY_S):
            async for _ in call:
                pass
    except ClusterError as error:
        logger.debug("copy failed request=%s replica=%s: %s", request.id, prefill.id, error)
    except TimeoutError:
        logger.debug("copy timed out request=%s replica=%s timeout_s=%g", request.id, prefill.id, _COPY_S)
    finally:
        call.cancel()


def _is_idle(replica: Replica) -> bool:
    return not (replica.status.queued_tokens or replica.pending_tokens or replica.num_requests)
