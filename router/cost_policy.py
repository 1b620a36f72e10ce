"""Which pair serves a request: the one whose predicted cost, in seconds, is least. Pure.

    through a prefill replica P and a decode replica D
          max(queue of P, pull)   blocks that a peer or P's own lower tier holds come while P works on others' prompts
        + compute                 what is missing then, at P's own rates
        + transfer                bytes that D lacks / link rate
        + decode                  _HORIZON steps of D, what they cost the streams there, and waiting for blocks

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

from router.policy import Demand, Option, ReplicaView

_HORIZON = 64  # tokens of an answer for which the load on a decode replica counts
_SHORTLIST = 4
_STALL = 0.3  # a stream beside a prompt goes on, by one token per chunk
_KEEP = 1.0
_PULL_LATENCY_S = 0.002  # of asking a peer, beyond what the bytes take


@dataclass(slots=True)
class _Prompt:
    """What it takes to have the prompt's KV on one replica."""

    view: ReplicaView
    queue_s: float
    compute_s: float
    pull_from: str | None = None
    pull_tokens: int = 0
    pull_s: float = 0.0
    keep_s: float = 0.0

    @property
    def cost_s(self) -> float:
        return max(self.queue_s, self.pull_s) + self.compute_s + self.keep_s


class CostPolicy:
    """The cheapest option first. Equal costs go to whom has fewer streams, then in the order given.

    pulls: replicas may fetch blocks from each other.
    """

    def __init__(self, *, pulls: bool) -> None:
        self._pulls = pulls

    def options(
        self, demand: Demand, prefills: Sequence[ReplicaView], decodes: Sequence[ReplicaView]
    ) -> Sequence[Option]:
        holders = heapq.nlargest(2, [*prefills, *decodes], key=lambda view: view.stored_tokens) if self._pulls else []
        local = [view for view in decodes if not prefills or _uncached(demand, view) <= demand.max_local_tokens]
        found = [_alone(demand, _prompt(demand, view, holders)) for view in local]
        if prefills:
            prompts = [_prompt(demand, view, holders) for view in prefills]
            prompts = heapq.nsmallest(_SHORTLIST, prompts, key=lambda prompt: prompt.cost_s)
            link = max(prompt.view.link_bytes_per_s for prompt in prompts)
            ends = [(_uncached_bytes(demand, view) / link + _decode_s(demand, view), view) for view in decodes]
            ends = heapq.nsmallest(_SHORTLIST, ends, key=lambda end: end[0])
            found += [_pair(demand, prompt, view) for prompt in prompts for _, view in ends]
        streams = {view.replica: view.num_streams for view in (*prefills, *decodes)}
        return sorted(found, key=lambda o: (o.cost_s, streams[o.prefill or o.decode], streams[o.decode]))


def _alone(demand: Demand, prompt: _Prompt) -> Option:
    return Option(
        prefill=None,
        decode=prompt.view.replica,
        queue_s=prompt.queue_s,
        pull_from=prompt.pull_from,
        pull_tokens=prompt.pull_tokens,
        pull_s=prompt.pull_s,
        compute_s=prompt.compute_s,
        stall_s=prompt.compute_s * prompt.view.num_streams * _STALL,
        keep_s=prompt.keep_s,
        decode_s=_decode_s(demand, prompt.view),
    )


def _pair(demand: Demand, prompt: _Prompt, decode: ReplicaView) -> Option:
    return Option(
        prefill=prompt.view.replica,
        decode=decode.replica,
        queue_s=prompt.queue_s,
        pull_from=prompt.pull_from,
        pull_tokens=prompt.pull_tokens,
        pull_s=prompt.pull_s,
        compute_s=prompt.compute_s,
        keep_s=prompt.keep_s,
        transfer_s=_uncached_bytes(demand, decode) / prompt.view.link_bytes_per_s,
        decode_s=_decode_s(demand, decode),
    )


def _prompt(demand: Demand, view: ReplicaView, holders: Sequence[ReplicaView]) -> _Prompt:
    """The quickest way to the prompt's KV: compute what is not cached, or fetch some of it first."""
    compute_s = _compute_s(demand, view, view.cached_tokens)
    keep_s = _KEEP * compute_s
    best = _Prompt(view, view.queue_s, compute_s, keep_s=keep_s)
    if view.restore_bytes_per_s and view.stored_tokens > view.cached_tokens:
        restore_s = (view.stored_tokens - view.cached_tokens) * demand.bytes_per_token / view.restore_bytes_per_s
        best = _quicker(best, _fetch(demand, view, view.replica, view.stored_tokens, restore_s, keep_s))
    for holder in holders:
        if holder.replica != view.replica and holder.stored_tokens > view.stored_tokens:
            num_bytes = (holder.stored_tokens - view.cached_tokens) * demand.bytes_per_token
            pull_s = _PULL_LATENCY_S + num_bytes / holder.link_bytes_per_s
            best = _quicker(best, _fetch(demand, view, holder.replica, holder.stored_tokens, pull_s, keep_s))
    return best


def _fetch(demand: Demand, view: ReplicaView, source: str, tokens: int, pull_s: float, keep_s: float) -> _Prompt:
    return _Prompt(view, view.queue_s, _compute_s(demand, view, tokens), source, tokens, pull_s, keep_s)


def _quicker(one: _Prompt, other: _Prompt) -> _Prompt:
    return other if other.cost_s < one.cost_s else one


def _compute_s(demand: Demand, view: ReplicaView, after: int) -> float:
    # The last token is computed even where all of the prompt is cached: its logits are wanted.
    missing = max(1, demand.num_tokens - after)
    return view.timing.prefill_s(missing, after=demand.num_tokens - missing, chunk=view.max_batch_tokens)


def _decode_s(demand: Demand, view: ReplicaView) -> float:
    """Our own steps there, and by how much each of them delays the others."""
    slower_s = view.timing.token_s + view.timing.context_s * demand.num_tokens
    step_s = view.timing.base_s + slower_s * (view.num_streams + 1)
    missing = -(-(_uncached(demand, view) + 1) // demand.block_size) - view.available_blocks
    # Blocks come back as streams end: each missing one is a share of a stream's remaining life.
    waiting_s = max(0, missing) / view.num_blocks * max(1, view.num_streams) * _HORIZON * step_s
    return _HORIZON * (step_s + slower_s * view.num_streams) + waiting_s


def _uncached(demand: Demand, view: ReplicaView) -> int:
    return max(0, demand.num_tokens - view.cached_tokens)


def _uncached_bytes(demand: Demand, view: ReplicaView) -> int:
    return _uncached(demand, view) * demand.bytes_per_token
