"""What the control plane asks of a rank. `worker.rank_process.RankProcess` answers it, whatever the role.

A rank is what `make_rank(launch, identity=…)` of `prefill_worker.actor` or `decode_worker.actor` makes: a plain object.
`cluster.ray.rank_actor` imports that function by its path, and runs the rank in a process of its own. The life of a
replica with two ranks, as its ranks see it:

 1  make_rank, bind      on every rank: open the gRPC server on any free port, say where it is
 2  load(addresses)      on every rank at once: form the gang, load the weights, begin to serve; progress() meanwhile
 3  run_forever          blocks until stop(), or raises: this is how the controller learns of a failure
 4  status               of rank 0, every second
 5  drain                on every rank; then status() until rank 0 is "drained"
 6  stop                 on every rank

One that changes its role is another rank in the same process: after 5, make_rank, bind and succeed(the one before) on
every rank, and on from 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

if TYPE_CHECKING:  # commands know what a rank says of itself, and must not wait for pydantic
    from core.identity.credentials import Identity
    from core.types.launch import Launch


class Binding(TypedDict):
    """Where a rank runs and listens."""

    pid: int
    host: str  # the node's name, for people
    address: str  # "host:port" of its gRPC server, on its node's IP
    device: str  # "cpu", "cuda:0"


class Blocks(TypedDict):
    total: int
    free: int
    cached: int  # unused, but still holding a prefix


class RankStatus(TypedDict):
    """What rank 0 says of its whole replica."""

    state: Literal["loading", "ready", "draining", "drained"]
    running: int  # sequences
    waiting: int
    blocks: Blocks


class Progress(TypedDict):
    stage: str  # a few words: "loading weights"
    fraction: float  # of the whole of load(), 0 to 1


class Rank(Protocol):
    """One process of a replica. Methods are called from several threads: `status` and `progress` while `load` runs."""

    def __init__(self, launch: Launch, *, identity: Identity) -> None:
        """As `make_rank` is called. Quick: nothing is loaded yet. identity: of this rank, whose replica and number it
        names; whoever gives it renews it."""
        ...

    def bind(self) -> Binding:
        """Open the gRPC server. Asked again (by a controller that restarted), it gives the same answer."""
        ...

    def load(self, addresses: list[str]) -> None:
        """Block until this rank serves. `addresses`: of all ranks, in rank order. Raises with a clear message."""
        ...

    def progress(self) -> Progress: ...

    def run_forever(self) -> None:
        """Return after stop(); raise when the rank cannot go on. A controller that restarted calls it a second time."""
        ...

    def status(self) -> RankStatus: ...

    def drain(self) -> None:
        """Take no new request from now on; finish those that are here, or hand them over. Returns at once."""
        ...

    def succeed(self, before: Any) -> None:
        """After bind(), instead of the weights that load() would read: go on with those of the rank that this process
        has been, which has drained, and its cached blocks. That one serves nobody any more when this returns. Raises
        where it loaded what this one cannot use, or has not let go of all; then nothing is left of either."""
        ...

    def stop(self) -> None:
        """Leave the membership at once, and let run_forever return."""
        ...
