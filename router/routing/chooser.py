"""Choice of the replicas for a request: rules of length, room and past failures, around a policy. Pure.

Inputs are the state of the replicas (`ReplicaLoad`), where the index finds the prompt's prefix, and the request. The
output is a `Decision` with its reasons. `router.serving.reservations` gathers the one and carries out the other.

Guests. A prefill replica may answer a request alone while decode replicas are full. Waiting for these has a price, as
every other way has: the seconds until as many streams have ended as requests wait, this one included, for a request
that takes the next free place delays all that wait by one place. Beside that stands the cost of the answer on a prefill
replica: its prompts go first, and each step of the answer delays them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from core.index.prefix_index import Depths
from core.types.handoff import PrefixSource
from router.routing.fair_queue import Places
from router.routing.policy import CandidateReplica, Option, Policy, RoutingRequest
from router.routing.replica_load import ReplicaLoad, UsualRates, candidate_of

_NOTHING = Depths(0, 0, 0)
_NOBODY: frozenset[str] = frozenset()
_DEFAULT_ANSWER = 64.0  # tokens, before any answer was seen
_WEIGHT = 0.05  # of the newest answer
_LONGEST_WAIT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Need:
    """Room that a request, or the rest of one, needs."""

    num_tokens: int  # prompt, and tokens so far
    num_streams: int = 1
    num_blocks: int = 0  # on a decode replica, with the answer that is predicted
    max_new_tokens: int = 1 << 31

    @property
    def places(self) -> Places:
        return Places(self.num_streams, self.num_blocks)


class AnswerLength:
    """Mean length of answers, in tokens; recent ones weigh more."""

    def __init__(self) -> None:
        self._mean = _DEFAULT_ANSWER

    def add(self, num_tokens: int) -> None:
        self._mean += _WEIGHT * (num_tokens - self._mean)

    def predict(self, max_tokens: int) -> int:
        """Predict the length of an answer that may have max_tokens."""
        return max(1, min(max_tokens, round(self._mean)))


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The replicas for a request, and the reasons."""

    prefill: str | None  # None: the decode replica computes the prompt itself
    decode: str | None  # None: the first token is the last
    prompt_tokens: int  # to be computed of the prompt
    prefix_source: PrefixSource | None  # the peer that gives its blocks, where the option taken counts on one
    options: Sequence[Option]  # all that were weighed, the one taken first
    candidates: Sequence[CandidateReplica]  # and by what


class Chooser:
    """`policy` may count its turns; nothing else here remembers anything.

    Replicas in `avoid` have failed the request before: they are the last resort.
    """

    def __init__(self, policy: Policy, *, max_local_tokens: int) -> None:
        """max_local_tokens: uncached ones that a decode replica may compute itself."""
        self._policy = policy
        self._max_local_tokens = max_local_tokens

    def choose(
        self,
        need: Need,
        prefills: Sequence[ReplicaLoad],
        decodes: Sequence[ReplicaLoad],
        depths: Mapping[str, Depths],
        *,
        avoid: Set[str] = _NOBODY,
        prefill_needs_room: bool = False,
    ) -> Decision | None:
        """The cheapest way, of all where both replicas are free to choose; None where there is none.

        prefill_needs_room: rather none than a prefill replica that has a second of work left.
        """
        if prefill_needs_room:
            crowded = {load.replica for load in prefills if not load.has_room_to_prefill}
            # A policy may offer a few only: let these be of those with room.
            prefills = [load for load in prefills if load.replica not in crowded] or prefills
        options, candidates = self._weigh(need, prefills, decodes, depths, avoid)
        if prefill_needs_room:
            options = [option for option in options if option.prefill not in crowded]
        return self._decide(need, options, candidates, [*prefills, *decodes]) if options else None

    def choose_local_decode(
        self,
        need: Need,
        hosts: Sequence[ReplicaLoad],
        prefills: Sequence[ReplicaLoad],
        decodes: Sequence[ReplicaLoad],
        depths: Mapping[str, Depths],
        *,
        num_waiting: int,
        answer_tokens: int,
    ) -> Decision | None:
        """The prefill replica of `hosts`, which have room, that is to answer all by itself; None where it is cheaper to
        wait for one of these decode replicas, which have none. num_waiting: beside this request."""
        names = {load.replica for load in hosts}
        alone, views = self._weigh(need, [], hosts, depths, _NOBODY)
        alone = [option for option in alone if option.prefill is None and option.decode in names]
        pairs, full = self._weigh(need, prefills, decodes, depths, _NOBODY)
        if not alone:
            return None
        ways = {load.replica for load in decodes}
        wait_s = guest_wait_s(
            [view for view in full if view.replica in ways],
            num_tokens=need.num_tokens,
            answer_tokens=answer_tokens,
            num_ends=num_waiting + need.num_streams,
        )
        options = cheapest(alone, pairs, wait_s=wait_s)
        if options[0].decode not in names:
            return None
        known = {view.replica: view for view in (*full, *views)}
        return self._decide(need, options, list(known.values()), [*hosts, *prefills, *decodes])

    def choose_prefill(
        self,
        need: Need,
        prefills: Sequence[ReplicaLoad],
        decode: ReplicaLoad,
        depths: Mapping[str, Depths],
        *,
        avoid: Set[str],
    ) -> Decision | None:
        """A prefill replica, none of `avoid`, for a request whose decode replica is fixed."""
        prefills = [load for load in prefills if load.replica not in avoid]
        options, candidates = self._weigh(need, prefills, [decode], depths, avoid)
        options = [option for option in options if option.prefill]
        return self._decide(need, options, candidates, [*prefills, decode]) if options else None

    def _weigh(
        self,
        need: Need,
        prefills: Sequence[ReplicaLoad],
        decodes: Sequence[ReplicaLoad],
        depths: Mapping[str, Depths],
        avoid: Set[str],
    ) -> tuple[Sequence[Option], list[CandidateReplica]]:
        """The options, and what they were weighed by."""
        decodes = [load for load in decodes if need.num_tokens < load.member.max_tokens]
        if not decodes:
            return [], []
        request = RoutingRequest(
            num_tokens=need.num_tokens,
            block_size=decodes[0].member.block_size,
            bytes_per_token=decodes[0].member.bytes_per_token,
            max_local_tokens=self._max_local_tokens,
        )
        usual = UsualRates.of([*prefills, *decodes])
        prefill_side, decode_side = (
            [candidate_of(load, depths.get(load.replica, _NOTHING), usual) for load in _preferred(loads, avoid)]
            for loads in (prefills, decodes)
        )
        return self._policy.options(request, prefill_side, decode_side), [*prefill_side, *decode_side]

    def _decide(
        self,
        need: Need,
        options: Sequence[Option],
        candidates: Sequence[CandidateReplica],
        loads: Sequence[ReplicaLoad],
    ) -> Decision:
        option = options[0]
        computes = option.prefill or option.decode
        held = max((one.cached_tokens for one in candidates if one.replica == computes), default=0)
        prefix_source = next((load for load in loads if load.replica == option.fetch_from), None)
        if prefix_source and prefix_source.replica == computes:
            prefix_source = None  # its own lower tier
        return Decision(
            prefill=option.prefill,
            decode=None if option.prefill and need.max_new_tokens == 1 else option.decode,
            prompt_tokens=max(1, need.num_tokens - max(held, option.fetch_tokens)),
            prefix_source=PrefixSource(
                replica=prefix_source.replica, address=prefix_source.member.address, num_tokens=option.fetch_tokens
            )
            if prefix_source
            else None,
            options=options,
            candidates=candidates,
        )


def with_room(decodes: Sequence[ReplicaLoad], need: Need) -> list[ReplicaLoad]:
    """The decode replicas that would take it up at once."""
    blocks, streams = need.num_blocks, need.num_streams
    return [load for load in decodes if load.has_room_to_decode(num_blocks=blocks, num_streams=streams)]


def with_room_for_local_decode(prefills: Sequence[ReplicaLoad], need: Need) -> list[ReplicaLoad]:
    """The prefill replicas that would answer it themselves at once."""
    blocks, streams = need.num_blocks, need.num_streams
    return [load for load in prefills if load.has_room_for_local_decode(num_blocks=blocks, num_streams=streams)]


def _preferred(loads: Sequence[ReplicaLoad], avoid: Set[str]) -> Sequence[ReplicaLoad]:
    """Those that have not failed this request yet; all, if all have."""
    return [load for load in loads if load.replica not in avoid] or loads


def guest_wait_s(decodes: Sequence[CandidateReplica], *, num_tokens: int, answer_tokens: int, num_ends: int) -> float:
    """Predict when so many streams have ended on these replicas, which are full; an hour where none does.

    num_tokens: of a stream's context. answer_tokens: mean length of answers; a running one is anywhere in it.
    """
    per_s = sum(_ends_per_s(view, num_tokens=num_tokens, answer_tokens=answer_tokens) for view in decodes)
    return min(_LONGEST_WAIT_S, num_ends / per_s) if per_s else _LONGEST_WAIT_S


def cheapest(local_decode: Sequence[Option], pairs: Sequence[Option], *, wait_s: float) -> list[Option]:
    """Sort all options by cost. guest: on prefill replicas alone, at once. pairs: after a wait, and preferred at the
    same cost."""
    waiting = [replace(option, wait_s=wait_s) for option in pairs]
    return sorted([*waiting, *local_decode], key=lambda option: option.cost_s)


def _ends_per_s(view: CandidateReplica, *, num_tokens: int, answer_tokens: int) -> float:
    timing = view.timing
    step_s = timing.base_s + (timing.token_s + timing.context_s * num_tokens) * view.num_streams
    return view.num_streams / (max(1, answer_tokens) * step_s) if step_s else math.inf
