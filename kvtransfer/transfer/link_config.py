"""Configuration shared by all links of a rank, in both directions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch.distributed import Store

from core.identity.credentials import Identity
from core.rpc import transfer_pb2 as pb
from core.types.failpoint import Failpoint, unobserved
from core.types.wire_version import WIRE_VERSION
from engine.kv.pool import KVPool
from kvtransfer.links.backends import make_link
from kvtransfer.links.link import MEET_TIMEOUT_S, Link, LinkEnd, LinkGuard
from kvtransfer.transfer.codec import Codec, codec_for


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkConfig:
    """Link configuration of one rank, for its Sender and its Receiver."""

    rank: int
    identity: Identity  # client identity of this rank
    pool: KVPool
    wire_dtype: str
    backend: str
    host: str  # own address, reachable by its peers
    timeout_s: float  # for a peer to respond; the time to move the bytes is added
    guard: LinkGuard
    failpoint: Failpoint = unobserved

    @cached_property
    def codec(self) -> Codec:
        """Codec of this rank's links. The first access may take seconds; see codec_for."""
        return codec_for(self.pool.layout, self.wire_dtype)

    def hello(self, epoch: int) -> pb.Hello:
        """Return the greeting of a link's sender. The receiver compares it with its own."""
        layout = self.pool.layout
        return pb.Hello(
            wire_version=WIRE_VERSION,
            layout=layout.fingerprint,
            sender=str(self.identity.name),  # the peer compares it with the certificate
            epoch=epoch,
            backend=f"{self.backend}, encrypted" if self.guard.is_encrypted else self.backend,
            wire_dtype=self.wire_dtype,
            sender_rank=self.rank,
            sender_ranks=layout.tensor_parallel,
        )

    def make_link(self, store: Store, *, prefix: str, is_sender: bool) -> Link:
        """Create this side's end of a link, not yet connected. Raises as backends.make_link does."""
        end = LinkEnd(
            store=store,
            prefix=prefix,
            is_sender=is_sender,
            host=self.host,
            device=self.pool.device,
            timeout_s=MEET_TIMEOUT_S,
            guard=self.guard,
        )
        return make_link(self.backend, end)
