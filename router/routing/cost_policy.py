"""Which pair serves a request: the one whose predicted cost, in seconds, is least. Pure.

    through a prefill replica P and a decode replica D
          max(queue of P, pull)   blocks that a peer or P's own lower tier holds come while P works on others' prompts
        + compute                 what is missing then, at P's own rates
        + transfer                bytes that D lacks / link rate
        + decode                  D's steps until _HORIZON tokens, which are fewer where it drafts, what they cost the
                                  streams there, and waiting for blocks

    on D alone, where the uncached part is short or there is no P
          max(queue of D, pull) + compute + decode
        + stall                   what the streams there lose meanwhile, _STALL of the compute time each

    + keep                        storing once more what others hold already throws out blocks of somebody else's: _KEEP
                                  of what it took to compute the blocks that this replica must take up

With many replicas only the _SHORTLIST best of each side are paired.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from router.routing.policy import CandidateReplica, Option, RoutingRequest

_HORIZON = 64  # tokens of an answer for which the load on a decode replica counts
_SHORTLIST = 4
_STALL = 0.3  # a stream beside a prompt goes on, by one token per chunk
_KEEP = 1.0
_FETCH_LATENCY_S = 0.002  # of asking a peer, beyond what the bytes take


@dataclass(slots=True)
class _Prompt:
    """What it takes to have the prompt's KV on one replica."""

    view: CandidateReplica
    cost_s: float
    compute_s: float
    keep_s: float
    fetch_from: str | None = None
    fetch_tokens: int = 0
    fetch_s: float = 0.0


@dataclass(slots=True)
class _End:
    """What it takes to decode on one replica what another has computed."""

    view: CandidateReplica
    num_bytes: int  # that must come there
    decode_s: float


class CostPolicy:
    """The cheapest option first. Equal costs go to whom has fewer streams, then in the order given.

    pulls: replicas may fetch blocks from each other.
    """

    def __init__(self, *, prefix_fetches: bool = False) -> None:
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
            ends = [
                _End(view, _uncached(demand, view) * demand.bytes_per_token, _decode_s(demand, view))
                for view in decodes
            ]
            ends = heapq.nsmallest(_SHORTLIST, ends, key=lambda end: end.num_bytes / link + end.decode_s)
            found += [_pair(prompt, end) for prompt in prompts for end in ends]
        streams = {view.replica: view.num_streams for view in (*prefills, *decodes)}
        return sorted(found, key=lambda o: (o.cost_s, streams[o.prefill or o.decode], streams[o.decode]))


def _alone(demand: RoutingRequest, prompt: _Prompt) -> Option:
    view = prompt.view
    option = _option(prompt, prefill=None, decode=view.replica, decode_s=_decode_s(demand, view))
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
    """The quickest way to the prompt's KV: compute what is not cached, or fetch some of it first."""
    compute_s = view.compute_s(demand, view.cached_tokens)
    keep_s = _KEEP * compute_s
    best = _Prompt(view, view.queue_s + compute_s + keep_s, compute_s, keep_s)
    if view.restore_bytes_per_s and view.stored_tokens > view.cached_tokens:
        restore_s = (view.stored_tokens - view.cached_tokens) * demand.bytes_per_token / view.restore_bytes_per_s
        _try_fetch(best, demand, view, restore_s)
    prefix_source = next(
        (prefix_source for prefix_source in prefix_sources if prefix_source is not view), None
    )  # who holds most of it
    if prefix_source and prefix_source.stored_tokens > view.stored_tokens:
        num_bytes = (prefix_source.stored_tokens - view.cached_tokens) * demand.bytes_per_token
        _try_fetch(best, demand, prefix_source, _FETCH_LATENCY_S + num_bytes / prefix_source.link_bytes_per_s)
    return best


def _try_fetch(best: _Prompt, demand: RoutingRequest, source: CandidateReplica, fetch_s: float) -> None:
    """Fetch all that `source` stores and compute the rest, if that is quicker than the best way so far."""
    view = best.view
    before_s = max(view.queue_s, fetch_s) + best.keep_s
    if before_s >= best.cost_s:
        return
    compute_s = view.compute_s(demand, source.stored_tokens)
    if before_s + compute_s < best.cost_s:
        best.cost_s, best.compute_s = before_s + compute_s, compute_s
        best.fetch_from, best.fetch_tokens, best.fetch_s = source.replica, source.stored_tokens, fetch_s


def _decode_s(demand: RoutingRequest, view: CandidateReplica) -> float:
    """Our own steps there, and by how much each of them delays the others."""
    slower_s = view.timing.token_s * (1 + view.drafted_per_row) + view.timing.context_s * demand.num_tokens
    step_s = view.timing.base_s + slower_s * (view.num_streams + 1)
    num_steps = _HORIZON / view.tokens_per_row
    decode_s = num_steps * (step_s + slower_s * view.num_streams)
    missing = -(-(_uncached(demand, view) + 1) // demand.block_size) - view.available_blocks
    if missing > 0:  # blocks come back as streams end: each missing one is a share of a stream's remaining life
        decode_s += missing / view.num_blocks * max(1, view.num_streams) * num_steps * step_s
    return decode_s


def _uncached(demand: RoutingRequest, view: CandidateReplica) -> int:
    return max(0, demand.num_tokens - view.cached_tokens)
