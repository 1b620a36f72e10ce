"""Choice of the replicas for a request: a policy, limited by rules on length, room and past failures. Pure.

Inputs are the request, the state of the replicas that are large enough for it (`ReplicaLoad`), and the places where the
index finds the prompt's prefix. The output is a `Decision` with its reasons. `router.serving.reservations` gathers the
inputs and applies the decision.

Local decode. A prefill replica may answer a request alone while the decode replicas are full. The alternative is to
wait until one stream has ended per queued request and per choice of this one. Each request that takes a free place
delays all later ones by one place, so the whole queue counts. That wait is compared with the cost of answering on the
prefill replica, where prompts go first and each step of the answer delays them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain

from core.index.prefix_index import NOTHING, Depths
from core.types.handoff import PrefixSource
from router.routing.candidates import (
    CandidateReplica,
    Option,
    Policy,
    ReplicaLoad,
    RoutingRequest,
    UsualRates,
    candidate_of,
)
from router.routing.fair_queue import Places

Culprit = str | tuple[str, str]  # a replica that failed a request, or a (prefill, decode) pair whose link failed
NO_CULPRITS: frozenset[Culprit] = frozenset()
_DEFAULT_ANSWER = 64.0  # tokens
_WEIGHT = 0.05  # weight of the newest answer in the mean
_LONGEST_WAIT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Need:
    """Room needed by a request, or by the rest of an interrupted one."""

    num_tokens: int  # prompt and tokens generated so far
    num_streams: int = 1
    num_blocks: int = 0  # on a decode replica, including the predicted answer
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
    """Replicas chosen for a request, with the reasons."""

    prefill: str | None  # None: the decode replica computes the prompt itself
    decode: str | None  # None: the first token is the last
    prompt_tokens: int  # prompt tokens to compute
    prefix_source: PrefixSource | None  # peer from which the chosen option fetches blocks
    options: Sequence[Option]  # all options considered, the chosen one first
    candidates: Sequence[CandidateReplica]  # the replicas that the policy compared


class Chooser:
    """Chooser of replicas for requests. Stateless apart from `policy`.

    The argument `avoid` of its methods holds pairs whose link has failed the request. If it leaves no pair, the decode
    replica computes the prompt.
    """

    def __init__(self, policy: Policy, *, max_local_tokens: int) -> None:
        """max_local_tokens: maximum number of uncached tokens that a decode replica computes itself."""
        self._policy = policy
        self._max_local_tokens = max_local_tokens

    def choose(
        self,
        need: Need,
        prefills: Sequence[ReplicaLoad],
        decodes: Sequence[ReplicaLoad],
        depths: Mapping[str, Depths],
        *,
        avoid: Set[Culprit] = NO_CULPRITS,
        prefill_needs_room: bool = False,
    ) -> Decision | None:
        """Return the cheapest decision over all pairs of `prefills` and `decodes`; None if there is none.

        prefill_needs_room: never pick a prefill replica with more than a second of work queued.
        """
        if prefill_needs_room:
            crowded = {load.replica for load in prefills if not load.has_room_to_prefill}
            # A policy may return few options, so offer it only replicas with room if there are any.
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
        """Return a decision for one of `hosts` to answer alone; None if waiting for a decode replica is cheaper.

        hosts: prefill replicas with room. decodes: decode replicas, all full. num_waiting: requests queued besides
        this one.
        """
        names = {load.replica for load in hosts}
        alone, views = self._weigh(need, [], hosts, depths, NO_CULPRITS)
        alone = [option for option in alone if option.prefill is None and option.decode in names]
        pairs, full = self._weigh(need, prefills, decodes, depths, NO_CULPRITS)
        if not alone:
            return None
        decode_names = {load.replica for load in decodes}
        wait_s = decode_wait_s(
            [view for view in full if view.replica in decode_names],
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
        avoid: Set[Culprit],
    ) -> Decision | None:
        """Choose a prefill replica for a request whose decode replica is fixed."""
        options, candidates = self._weigh(need, prefills, [decode], depths, avoid)
        options = [option for option in options if option.prefill]
        return self._decide(need, options, candidates, [*prefills, decode]) if options else None

    def _weigh(
        self,
        need: Need,
        prefills: Sequence[ReplicaLoad],
        decodes: Sequence[ReplicaLoad],
        depths: Mapping[str, Depths],
        avoid: Set[Culprit],
    ) -> tuple[Sequence[Option], list[CandidateReplica]]:
        """Return the policy's options and the candidates that it compared."""
        decodes = [load for load in decodes if need.num_blocks <= load.member.num_blocks] or decodes
        needs_decode = bool(decodes) or need.max_new_tokens > 1
        if not needs_decode:  # the first token is the last
            prefills, decodes = [], prefills
        if not decodes:
            return [], []
        request = RoutingRequest(
            num_tokens=need.num_tokens,
            cache=decodes[0].member.cache,
            max_local_tokens=self._max_local_tokens,
        )
        usual = UsualRates.of([*prefills, *decodes])
        views = {
            load.replica: candidate_of(load, depths.get(load.replica, NOTHING), usual) for load in (*prefills, *decodes)
        }
        options = self._options(request, prefills, decodes, views)
        if avoid:
            options = [option for option in options if (option.prefill, option.decode) not in avoid]
            options = options or self._options(request, [], decodes, views)
        if not needs_decode:
            options = [replace(option, prefill=option.decode) for option in options]
        return options, list(views.values())

    def _options(
        self,
        request: RoutingRequest,
        prefills: Sequence[ReplicaLoad],
        decodes: Sequence[ReplicaLoad],
        views: Mapping[str, CandidateReplica],
    ) -> Sequence[Option]:
        """Return the policy's options. Replicas of different KV layouts exchange no KV: weigh each layout alone.

        Decode replicas without a prefill replica of their layout are used only if all lack one.
        """
        groups = [
            [[views[load.replica] for load in side if load.member.layout == layout] for side in (prefills, decodes)]
            for layout in dict.fromkeys(load.member.layout for load in decodes)
        ]
        groups = [group for group in groups if group[0]] or groups
        every = [self._policy.options(request, *sides) for sides in groups]
        return every[0] if len(every) == 1 else sorted(chain(*every), key=lambda option: option.cost_s)

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
            prefix_source = None  # the source is the replica's own lower tier
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
    """Return the decode replicas that would run the request at once."""
    blocks, streams = need.num_blocks, need.num_streams
    return [load for load in decodes if load.has_room_to_decode(num_blocks=blocks, num_streams=streams)]


def with_room_for_local_decode(prefills: Sequence[ReplicaLoad], need: Need) -> list[ReplicaLoad]:
    """Return the prefill replicas that would decode the request themselves at once."""
    blocks, streams = need.num_blocks, need.num_streams
    return [load for load in prefills if load.has_room_for_local_decode(num_blocks=blocks, num_streams=streams)]


def decode_wait_s(decodes: Sequence[CandidateReplica], *, num_tokens: int, answer_tokens: int, num_ends: int) -> float:
    """Predict the seconds until `num_ends` streams have ended on `decodes`, all full; an hour if they run none.

    num_tokens: context length of a stream. answer_tokens: mean length of answers; running ones are taken to be spread
    evenly over it.
    """
    per_s = sum(_ends_per_s(view, num_tokens=num_tokens, answer_tokens=answer_tokens) for view in decodes)
    return min(_LONGEST_WAIT_S, num_ends / per_s) if per_s else _LONGEST_WAIT_S


def cheapest(local_decode: Sequence[Option], pairs: Sequence[Option], *, wait_s: float) -> list[Option]:
    """Sort all options by cost; at equal cost, pairs come first.

    local_decode: options on prefill replicas alone, available at once. pairs: options available after wait_s.
    """
    waiting = [replace(option, wait_s=wait_s) for option in pairs]
    return sorted([*waiting, *local_decode], key=lambda option: option.cost_s)


def _ends_per_s(view: CandidateReplica, *, num_tokens: int, answer_tokens: int) -> float:
    timing = view.timing
    step_s = timing.base_s + (timing.token_s + timing.context_s * num_tokens) * view.num_streams
    return view.num_streams / (max(1, answer_tokens) * step_s) if step_s else math.inf
