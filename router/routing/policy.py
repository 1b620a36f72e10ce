"""Inputs and outputs of a routing decision, shared by the policies, the router and the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from core.model.kv_memory import CacheShape
from core.types.step_timing import StepTiming

# Not frozen: a decision makes hundreds of these, and a frozen dataclass sets each field by a call.


@dataclass(kw_only=True, slots=True)
class CandidateReplica:
    """State of one replica with respect to one prompt."""

    replica: str
    cached_tokens: int  # prefix tokens cached on the device, including blocks of prompts queued before this one
    stored_tokens: int  # prefix tokens on the device or in a lower tier; at least cached_tokens
    queue_s: float  # time to compute the prompts already queued
    num_streams: int  # running and waiting sequences
    num_blocks: int  # total KV blocks
    available_blocks: int  # free blocks, and cached blocks that no sequence uses
    timing: StepTiming  # step time model
    is_learnt: bool = True  # `timing` comes from the replica's own steps, not from others or defaults
    max_batch_tokens: int  # token limit of a step; longer prompts take several steps
    link_bytes_per_s: float  # rate of outgoing KV
    held_tokens: int = 0  # prefix tokens on the device, with or without states behind them; 0: as cached_tokens
    restore_bytes_per_s: float = 0.0  # rate from lower tiers to the device; 0: no lower tiers
    tokens_per_row: float = 1.0  # tokens that a step yields per sequence; above 1 with drafts
    drafted_per_row: float = 0.0  # draft tokens that a step computes per sequence

    def compute_s(self, demand: RoutingRequest, after: int) -> float:
        """Predict the seconds to compute the prompt when the KV of its first `after` tokens is present."""
        # The last token is always computed, even if the whole prompt is cached, because its logits are needed.
        missing = max(1, demand.num_tokens - after)
        return self.timing.prefill_s(missing, after=demand.num_tokens - missing, chunk=self.max_batch_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingRequest:
    """Request as seen by a policy."""

    num_tokens: int
    cache: CacheShape  # bytes to ship
    max_local_tokens: int  # maximum number of uncached tokens that a decode replica computes itself


@dataclass(kw_only=True, slots=True)
class Option:
    """One way to serve the request, with its predicted cost in seconds."""

    prefill: str | None  # None: the decode replica computes the prompt itself
    decode: str
    wait_s: float = 0.0  # wait for room on the decode replica, for this request and those queued with it
    queue_s: float = 0.0  # queue of the replica that computes the prompt
    fetch_from: str | None = None  # source of missing blocks: a peer, or the replica itself for its lower tier
    fetch_tokens: int = 0  # prefix tokens present after the fetch
    fetch_s: float = 0.0  # fetch time; overlaps queue_s
    compute_s: float = 0.0  # prefill of the tokens still missing after the fetch
    keep_s: float = 0.0  # future cost of the cached blocks that this prompt evicts
    transfer_s: float = 0.0  # KV transfer from prefill to decode replica
    stall_s: float = 0.0  # delay of the decode replica's streams by a local prefill
    decode_s: float = 0.0  # first tokens of the answer, including the delay of the streams beside it

    @property
    def ttft_s(self) -> float:
        """Time from admission to the first token."""
        return max(self.queue_s, self.fetch_s) + self.compute_s

    @property
    def cost_s(self) -> float:
        return self.wait_s + self.ttft_s + self.keep_s + self.transfer_s + self.stall_s + self.decode_s


class Policy(Protocol):
    """Routing policy. Owned by one router, on its event loop."""

    def options(
        self, demand: RoutingRequest, prefills: Sequence[CandidateReplica], decodes: Sequence[CandidateReplica]
    ) -> Sequence[Option]:
        """Return the ways to serve the request, best first; empty if there is no decode replica."""
        ...
