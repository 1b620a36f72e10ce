"""Routing policies by name, pure. `cost`, the default, picks the pair of the lowest cost; the others are to compare.

The predicted cost, in seconds:

    prefill on replica P, decode on replica D
          max(queue of P, fetch)  blocks arrive from a peer or P's lower tier while P computes earlier prompts
        + compute                 the tokens still missing, at P's rates
        + transfer                bytes missing on D / link rate
        + decode                  D's steps for _HORIZON tokens (fewer with drafts), the delay of D's other streams,
                                  and the wait for blocks

    all on D, if the uncached part is short or without a P
          max(queue of D, fetch) + compute + decode
        + stall                   delay of D's other streams: _STALL of the compute time for each

    + keep                        cost of the cached blocks that this prompt evicts: _KEEP times the time to compute
                                  its uncached part

Only the _SHORTLIST best replicas of each side are paired.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.spec.plugin import find, made
from router.routing.candidates import CandidateReplica, Option, Policy, RoutingRequest

_HORIZON = 64  # answer tokens over which the load of a decode replica is weighed
_SHORTLIST = 4
_STALL = 0.3  # below 1: a stream beside a prompt still gets one token per chunk
_KEEP = 1.0
_FETCH_LATENCY_S = 0.002  # fixed latency of a fetch from a peer
_MIN_SHARE = 0.1  # cached fraction of the prompt below which affinity is ignored
_IMBALANCE = 32  # difference in streams between busiest and idlest replica above which affinity is ignored

View = CandidateReplica
Choose = Callable[[RoutingRequest, Sequence[View]], View]


@dataclass(slots=True)
class _Prompt:
    """Cost of having the prompt's KV on one replica."""

    view: CandidateReplica
    cost_s: float
    compute_s: float
    keep_s: float
    fetch_from: str | None = None
    fetch_tokens: int = 0
    fetch_s: float = 0.0


@dataclass(slots=True)
class _End:
    """Cost of decoding on one replica after another has computed the prompt."""

    view: CandidateReplica
    num_bytes: int  # KV to transfer
    decode_s: float


class CostPolicy:
    """Cost-based policy. Ties go to the replica with fewer streams, then to the given order."""

    def __init__(self, *, prefix_fetches: bool = False) -> None:
        """prefix_fetches: replicas may fetch blocks from each other."""
        self._prefix_fetches = prefix_fetches

    def options(
        self, demand: RoutingRequest, prefills: Sequence[CandidateReplica], decodes: Sequence[CandidateReplica]
    ) -> Sequence[Option]:
        prefix_sources = (
            heapq.nlargest(2, [*prefills, *decodes], key=lambda view: view.stored_tokens)
            if self._prefix_fetches
            else []
        )
        local = [view for view in decodes if not prefills or _uncached(demand, view) <= demand.max_local_tokens]
        found = [_alone(demand, _prompt(demand, view, prefix_sources)) for view in local]
        if prefills:
            prompts = [_prompt(demand, view, prefix_sources) for view in prefills]
            prompts = heapq.nsmallest(_SHORTLIST, prompts, key=lambda prompt: prompt.cost_s)
            link = max(prompt.view.link_bytes_per_s for prompt in prompts)
            ends = [_end(demand, view) for view in decodes]
            ends = heapq.nsmallest(_SHORTLIST, ends, key=lambda end: end.num_bytes / link + end.decode_s)
            found += [_pair(prompt, end) for prompt in prompts for end in ends]
        streams = {view.replica: view.num_streams for view in (*prefills, *decodes)}
        return sorted(found, key=lambda o: (o.cost_s, streams[o.prefill or o.decode], streams[o.decode]))


def _end(demand: RoutingRequest, view: CandidateReplica) -> _End:
    held = _held(view)
    num_bytes = demand.cache.shipped_bytes(demand.num_tokens, held=held)
    return _End(view, num_bytes, _decode_s(demand, view, held=held))


def _alone(demand: RoutingRequest, prompt: _Prompt) -> Option:
    view = prompt.view
    decode_s = _decode_s(demand, view, held=view.cached_tokens)
    option = _option(prompt, prefill=None, decode=view.replica, decode_s=decode_s)
    option.stall_s = prompt.compute_s * view.num_streams * _STALL
    return option


def _pair(prompt: _Prompt, end: _End) -> Option:
    option = _option(prompt, prefill=prompt.view.replica, decode=end.view.replica, decode_s=end.decode_s)
    option.transfer_s = end.num_bytes / prompt.view.link_bytes_per_s
    return option


def _option(prompt: _Prompt, *, prefill: str | None, decode: str, decode_s: float) -> Option:
    return Option(
        prefill=prefill,
        decode=decode,
        queue_s=prompt.view.queue_s,
        fetch_from=prompt.fetch_from,
        fetch_tokens=prompt.fetch_tokens,
        fetch_s=prompt.fetch_s,
        compute_s=prompt.compute_s,
        keep_s=prompt.keep_s,
        decode_s=decode_s,
    )


def _prompt(demand: RoutingRequest, view: CandidateReplica, prefix_sources: Sequence[CandidateReplica]) -> _Prompt:
    """Return the fastest way to the prompt's KV: compute the uncached part, or fetch some of it first."""
    compute_s = view.compute_s(demand, view.cached_tokens)
    keep_s = _KEEP * compute_s
    best = _Prompt(view, view.queue_s + compute_s + keep_s, compute_s, keep_s)
    if view.restore_bytes_per_s and view.stored_tokens > view.cached_tokens:
        num_bytes = demand.cache.shipped_bytes(view.stored_tokens, held=_held(view))
        _try_fetch(best, demand, view, num_bytes / view.restore_bytes_per_s)
    prefix_source = next((source for source in prefix_sources if source is not view), None)
    if prefix_source and prefix_source.stored_tokens > view.stored_tokens:
        num_bytes = demand.cache.shipped_bytes(prefix_source.stored_tokens, held=view.cached_tokens)
        _try_fetch(best, demand, prefix_source, _FETCH_LATENCY_S + num_bytes / prefix_source.link_bytes_per_s)
    return best


def _try_fetch(best: _Prompt, demand: RoutingRequest, source: CandidateReplica, fetch_s: float) -> None:
    """Update `best` if fetching all that `source` stores and computing the rest is faster."""
    view = best.view
    before_s = max(view.queue_s, fetch_s) + best.keep_s
    if before_s >= best.cost_s:
        return
    compute_s = view.compute_s(demand, source.stored_tokens)
    if before_s + compute_s < best.cost_s:
        best.cost_s, best.compute_s = before_s + compute_s, compute_s
        best.fetch_from, best.fetch_tokens, best.fetch_s = source.replica, source.stored_tokens, fetch_s


def _decode_s(demand: RoutingRequest, view: CandidateReplica, *, held: int) -> float:
    """Predict the request's decode time on a replica, plus the delay that its steps cause to the other streams.

    held: tokens whose blocks the replica need not allocate.
    """
    slower_s = view.timing.token_s * (1 + view.drafted_per_row) + view.timing.context_s * demand.num_tokens
    step_s = view.timing.base_s + slower_s * (view.num_streams + 1)
    num_steps = _HORIZON / view.tokens_per_row
    decode_s = num_steps * (step_s + slower_s * view.num_streams)
    missing = -(-(max(0, demand.num_tokens - held) + 1) // demand.cache.block_size) - view.available_blocks
    if missing > 0:
        # Ending streams free blocks, so each missing block costs a fraction of a stream's remaining time.
        decode_s += missing / view.num_blocks * max(1, view.num_streams) * num_steps * step_s
    return decode_s


def _held(view: CandidateReplica) -> int:
    """Return how many tokens need not be shipped or loaded to a replica: also those without a state to compute from."""
    return view.held_tokens or view.cached_tokens


def _uncached(demand: RoutingRequest, view: CandidateReplica) -> int:
    return max(0, demand.num_tokens - view.cached_tokens)


class PoolByPool:
    """Policy that applies one rule to each pool independently."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose

    def options(self, demand: RoutingRequest, prefills: Sequence[View], decodes: Sequence[View]) -> Sequence[Option]:
        if not decodes:
            return []
        decode = self._choose(demand, decodes)
        prefill = self._choose(demand, prefills) if prefills else None
        return [Option(prefill=prefill.replica if prefill else None, decode=decode.replica)]


class RoundRobin:
    """Policy that takes the replicas of each pool in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def options(self, demand: RoutingRequest, prefills: Sequence[View], decodes: Sequence[View]) -> Sequence[Option]:
        self._turn += 1
        return PoolByPool(lambda _, views: views[self._turn % len(views)]).options(demand, prefills, decodes)


POLICIES: dict[str, Callable[[], Policy]] = {
    "cost": CostPolicy,
    "prefix": lambda: PoolByPool(_nearest),
    "least_loaded": lambda: PoolByPool(_idlest),
    "round_robin": RoundRobin,
}


def make_policy(name: str, *, prefix_fetches: bool = False) -> Policy:
    """Build a policy by its name in POLICIES, or as MODULE:NAME. Raises SpecError.

    prefix_fetches: replicas may fetch blocks from each other; only the cost policy uses it.
    """
    make = find(name, POLICIES)
    return CostPolicy(prefix_fetches=prefix_fetches) if make is CostPolicy else made(name, make)


def _idlest(_: RoutingRequest, views: Sequence[View]) -> View:
    """Pick the replica with the shortest queue, then the fewest streams."""
    return min(views, key=lambda view: (view.queue_s, view.num_streams))


def _nearest(demand: RoutingRequest, views: Sequence[View]) -> View:
    """Pick the replica with the longest cached prefix, or the idlest if that is short or the load is uneven."""
    streams = [view.num_streams for view in views]
    nearest = max(views, key=lambda view: (view.cached_tokens, -view.queue_s, -view.num_streams))
    if max(streams) - min(streams) > _IMBALANCE or nearest.cached_tokens < _MIN_SHARE * demand.num_tokens:
        return _idlest(demand, views)
    return nearest
