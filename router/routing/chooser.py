"""Which replicas serve a request: the rules of length, room and past failures, around a policy. Pure.

In go what is known of the replicas (`ReplicaLoad`), where the index finds the prompt's prefix, and the request; out
comes a `Decision` with its reasons. `router.serving.dispatch` gathers the one and carries out the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from core.index.prefix_index import Depths
from core.types.handoff import PrefixSource
from router.routing import local_decode
from router.routing.policy import CandidateReplica, Option, Policy, RoutingRequest
from router.routing.replica_load import ReplicaLoad, UsualRates, candidate_of

_NOTHING = Depths(0, 0, 0)
_NOBODY: frozenset[str] = frozenset()
_DEFAULT_ANSWER = 64.0  # tokens, before any answer was seen
_WEIGHT = 0.05  # of the newest answer


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a request, or what is left of one, asks of whoever serves it."""

    num_tokens: int  # prompt, and tokens so far
    num_streams: int = 1
    num_blocks: int = 0  # on a decode replica, with the answer that is predicted
    max_new_tokens: int = 1 << 31


class AnswerLength:
    """How long answers have been lately, in tokens: the mean, where a recent one weighs more."""

    def __init__(self) -> None:
        self._mean = _DEFAULT_ANSWER

    def add(self, num_tokens: int) -> None:
        self._mean += _WEIGHT * (num_tokens - self._mean)

    def predict(self, max_tokens: int) -> int:
        """Of a request that may have so many."""
        return max(1, min(max_tokens, round(self._mean)))


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Who serves a request, and why."""

    prefill: str | None  # None: the decode replica computes the prompt itself
    decode: str | None  # None: the first token is the last
    prompt_tokens: int  # that whoever computes the prompt must compute
    prefix_source: PrefixSource | None  # the peer that gives its blocks, where the option taken counts on one
    options: Sequence[Option]  # what was weighed, the one taken first
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
        wait_s = local_decode.wait_s(
            [view for view in full if view.replica in ways],
            num_tokens=need.num_tokens,
            answer_tokens=answer_tokens,
            num_ends=num_waiting + need.num_streams,
        )
        options = local_decode.cheapest(alone, pairs, wait_s=wait_s)
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
