"""What a rank's links have in common, in either direction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch.distributed import Store

from core.identity.credentials import Identity
from core.types.failpoint import Failpoint, unobserved
from engine.kv.pool import KVPool
from kvtransfer.links.link import MEET_TIMEOUT_S, LinkEnd, LinkGuard
from kvtransfer.transfer.codec import Codec, codec_for


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkConfig:
    """One rank's, for its Sender and its Receiver."""

    rank: int
    identity: Identity  # of this rank, to those whom it calls
    pool: KVPool
    wire_dtype: str
    backend: str
    host: str  # this rank's own address, on the network that its peers reach
    timeout_s: float  # for a peer to answer at all
    guard: LinkGuard
    failpoint: Failpoint = unobserved

    @cached_property
    def codec(self) -> Codec:
        """May take seconds at first; see codec_for."""
        return codec_for(self.pool.layout, self.wire_dtype)

    @property
    def mode(self) -> str:
        """What both sides must have chosen."""
        return f"{self.backend}, encrypted" if self.guard.is_encrypted else self.backend

    def link_end(self, store: Store, *, prefix: str, is_sender: bool) -> LinkEnd:
        return LinkEnd(
            store=store,
            prefix=prefix,
            is_sender=is_sender,
            host=self.host,
            device=self.pool.device,
            timeout_s=MEET_TIMEOUT_S,
            guard=self.guard,
        )
