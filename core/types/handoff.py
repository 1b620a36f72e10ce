"""The handoff: a ticket that lets one replica write KV into blocks that another one reserved."""

from __future__ import annotations

from dataclasses import dataclass

# Tokens that a sequence may grow by while its KV is shipped to another replica; then it must pause.
ROOM_TOKENS = 64

HandoffKey = tuple[str, int]  # a handoff's id, and the epoch of the attempt to fill it


@dataclass(frozen=True, kw_only=True)
class Handoff:
    """Ticket for one sequence's KV, from the replica that computes or holds it to the replica that requested it.

    The ticket names no block of the decode side: the sender addresses token positions, and each receiving rank maps
    them to blocks with its own table. A late, forged or repeated write therefore cannot reach any other block.

    `epoch` counts the attempts to fill this handoff. The router increments it when it gives the handoff to another
    prefill replica. A receiving rank that has seen epoch n rejects all lower ones.
    """

    id: str
    epoch: int
    replica: str  # the receiving replica
    ranks: tuple[str, ...]  # transfer addresses "host:port" of the replica's ranks, in rank order
    layout: str  # fingerprint of the replica's KV layout; see engine.kv.layout
    num_tokens: int  # minimum number of tokens whose KV the receiver needs
    max_tokens: int  # capacity in tokens; a sequence that decodes during its transfer grows
    first_token: int  # first position whose KV is missing; a multiple of the block size
    ttl_s: float  # time limit for the commit

    @property
    def key(self) -> HandoffKey:
        return self.id, self.epoch

    @property
    def num_missing_tokens(self) -> int:
        return self.num_tokens - self.first_token


@dataclass(frozen=True, kw_only=True)
class PrefixSource:
    """Hint that a replica holds a prefix. That replica decides what it can serve."""

    replica: str
    address: str  # "host:port" of rank 0
    num_tokens: int  # leading tokens
