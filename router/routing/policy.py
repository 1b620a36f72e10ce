"""What a routing decision is made from, and what comes out: the words that policies, dispatch and simulator share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from core.types.step_timing import StepTiming

# Not frozen: a decision makes hundreds of these, and a frozen dataclass sets each field by a call.


@dataclass(kw_only=True, slots=True)
class CandidateReplica:
    """What a policy knows of one replica."""

    replica: str
    cached_tokens: int  # leading tokens of this prompt that it holds, or will hold by the time their turn comes
    stored_tokens: int  # leading tokens that it holds on the device or in a lower tier; at least cached_tokens
    queue_s: float  # until it has computed the prompts that it has been given already
    num_streams: int  # running and waiting sequences
    num_blocks: int  # in all
    available_blocks: int  # free, or cached and unused
    timing: StepTiming  # how long its steps take
    max_batch_tokens: int  # of one step: a longer prompt is computed in several
    link_bytes_per_s: float  # of KV that it ships
    restore_bytes_per_s: float = 0.0  # from its lower tiers to its device; 0: it has none
    tokens_per_row: float = 1.0  # that a row of a step gets: more where it drafts
    drafted_per_row: float = 0.0  # tokens that a row computes beside its own

    def compute_s(self, demand: RoutingRequest, after: int) -> float:
        """Seconds for the prompt, of whose KV it has the first `after` tokens."""
        # The last token is computed even where all of the prompt is cached: its logits are wanted.
        missing = max(1, demand.num_tokens - after)
        return self.timing.prefill_s(missing, after=demand.num_tokens - missing, chunk=self.max_batch_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingRequest:
    """What a policy knows of the request."""

    num_tokens: int
    block_size: int
    bytes_per_token: int  # of KV on the wire
    max_local_tokens: int  # uncached tokens that a decode replica may compute itself


@dataclass(kw_only=True, slots=True)
class Option:
    """One way to serve the request, and what it is predicted to cost, in seconds."""

    prefill: str | None  # None: the decode replica computes the prompt itself
    decode: str
    wait_s: float = 0.0  # before there is room on the decode replica, for it and for whoever waits with it
    queue_s: float = 0.0  # before the replica that computes the prompt comes to it
    fetch_from: str | None = None  # who gives it blocks that it lacks: a peer, or its own lower tier
    fetch_tokens: int = 0  # leading tokens that it has when that is done
    fetch_s: float = 0.0  # while the queue goes on
    compute_s: float = 0.0  # of what is still missing then
    keep_s: float = 0.0  # what others will lose because these blocks take up room
    transfer_s: float = 0.0  # from prefill to decode
    stall_s: float = 0.0  # streams on the decode replica that wait meanwhile
    decode_s: float = 0.0  # of the answer's first tokens, and what they cost the streams beside them

    @property
    def ttft_s(self) -> float:
        """Until the first token, from when there is room."""
        return max(self.queue_s, self.fetch_s) + self.compute_s

    @property
    def cost_s(self) -> float:
        return self.wait_s + self.ttft_s + self.keep_s + self.transfer_s + self.stall_s + self.decode_s


class Policy(Protocol):
    """A way to decide. Owned by one router, on its event loop."""

    def options(
        self, demand: RoutingRequest, prefills: Sequence[CandidateReplica], decodes: Sequence[CandidateReplica]
    ) -> Sequence[Option]:
        """Ways to serve the request, the one to take first; none if there is no decode replica."""
        ...
