"""Interface between the control plane and a rank. `worker.rank_process.RankProcess` implements it for both roles.

`make_rank(launch, identity=…)` of `prefill_worker.actor` or `decode_worker.actor` returns a rank as a plain object.
`cluster.ray.rank_actor` imports that function by its path and runs the rank in a process of its own. Call order for a
replica with two ranks:

 1  make_rank, bind      on every rank: open the gRPC server on a free port and return its address
 2  load(addresses)      on every rank at once: form the gang, load the weights, start serving; progress() meanwhile
 3  run_forever          blocks until stop(); raises if the rank fails, which notifies the controller
 4  status               on rank 0, every second
 5  drain                on every rank; then status() until rank 0 is "drained"
 6  stop                 on every rank

A role switch creates another rank in the same process: after step 5, make_rank, bind and succeed(old rank) on every
rank, then step 2 onwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NotRequired, Protocol, TypedDict

if TYPE_CHECKING:  # CLI commands import RankStatus and must not wait for pydantic
    from core.identity.credentials import Identity
    from core.types.launch import Launch


class Binding(TypedDict):
    """Location and address of a rank."""

    pid: int
    host: str  # node name, for display
    address: str  # "host:port" of its gRPC server, on its node's IP
    device: str  # "cpu", "cuda:0"


class Blocks(TypedDict):
    total: int
    free: int
    cached: int  # unused blocks that still hold a prefix


class RankStatus(TypedDict):
    """Status of a whole replica, reported by its rank 0."""

    state: Literal["loading", "ready", "draining", "drained"]
    running: int  # sequences
    waiting: int
    blocks: Blocks
    member: NotRequired[bytes]  # signed record for routers (core.index.membership); absent until the replica serves


class Progress(TypedDict):
    stage: str  # for display, such as "loading weights"
    fraction: float  # of load(), 0 to 1


class Rank(Protocol):
    """One process of a replica. Several threads call its methods; `status` and `progress` even while `load` runs."""

    def __init__(self, launch: Launch, *, identity: Identity) -> None:
        """Set up the rank without loading anything. identity: of this replica and rank; the creator renews it."""
        ...

    def bind(self) -> Binding:
        """Open the gRPC server. Idempotent: a restarted controller calls it again and gets the same result."""
        ...

    def load(self, addresses: list[str]) -> None:
        """Block until this rank serves. addresses: of all ranks, in rank order. Raises if loading fails."""
        ...

    def progress(self) -> Progress: ...

    def run_forever(self) -> None:
        """Block until stop(); raise if the rank fails. A restarted controller calls it a second time."""
        ...

    def status(self) -> RankStatus: ...

    def drain(self) -> None:
        """Reject new requests; finish the running ones or hand them over. Returns at once."""
        ...

    def succeed(self, before: Any) -> None:
        """Take over the weights and cached blocks of `before`, the drained rank that this process ran so far.

        Called after bind() and instead of loading weights in load(). `before` serves no request afterwards. Raises if
        its state does not fit this rank, or if it has not released everything; then both ranks are unusable.
        """
        ...

    def stop(self) -> None:
        """Leave the membership at once and make run_forever return."""
        ...
