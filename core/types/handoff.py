"""The handoff: the ticket by which a replica lets another one write into blocks that it has set aside."""

from __future__ import annotations

from dataclasses import dataclass

HandoffKey = tuple[str, int]  # a handoff's id, and the epoch of the attempt to fill it


@dataclass(frozen=True, kw_only=True)
class Handoff:
    """A passage for one sequence's KV from the replica that computes or holds it to the one that asked for it.

    The ticket names no block of the decode side: the sender speaks of token positions, and each receiving rank looks
    them up in the table that it opened itself. So a late, forged or repeated write can reach no other block.

    `epoch` counts the attempts to fill this handoff: the router adds one when it gives the same handoff to another
    prefill replica, and a receiving rank that has seen epoch n refuses everything below n.
    """

    id: str
    epoch: int
    replica: str  # the one that asked
    ranks: tuple[str, ...]  # its ranks' transfer addresses "host:port", in rank order
    layout: str  # fingerprint of its KV layout; see engine.kv.layout
    num_tokens: int  # tokens whose KV it needs in all, at least
    max_tokens: int  # tokens that there is room for: a sequence that decodes while it is shipped grows
    first_token: int  # the first position whose KV it lacks; a multiple of the block size
    ttl_s: float  # it waits this long for the commit

    @property
    def key(self) -> HandoffKey:
        return self.id, self.epoch

    @property
    def num_missing_tokens(self) -> int:
        return self.num_tokens - self.first_token


@dataclass(frozen=True, kw_only=True)
class PrefixSource:
    """A replica that is said to hold a prefix: a hint, for it has the last word."""

    replica: str
    address: str  # "host:port" of rank 0
    num_tokens: int  # leading tokens
