"""Types of the controller's status, as `cluster status --json` prints it, and the interface that shows it."""

from __future__ import annotations

from typing import Any, NotRequired, Protocol, TypedDict

from core.types.rank_api import Blocks


class RankReport(TypedDict):
    pid: int
    device: str  # "cpu", "cuda:0"


class ReplicaReport(TypedDict):
    id: str
    state: str  # a cluster.control.replica.ReplicaState
    # Node name; empty before placement.
    node: str
    ranks: list[RankReport]
    blocks: Blocks
    running: int  # sequences
    waiting: int
    # Current activity, or the thing it waits for.
    stage: str
    fraction: float  # of loading, 0 to 1
    # Revision that it was started from.
    revision: NotRequired[int]
    # Id before its role switch; empty if it never switched.
    was: str


class FailureReport(TypedDict):
    """Failure of a replica."""

    replica: str
    role: str
    state: str  # at the time of the failure
    node: str
    reason: str
    # Another start would probably fail the same way.
    will_repeat: bool
    # All fields in one line.
    text: str


class PoolReport(TypedDict):
    desired: int  # replicas
    ready: int
    # Including starting and draining ones.
    replicas: list[ReplicaReport]
    # The last few, oldest first.
    failures: list[FailureReport]
    # Failed start rounds since a replica last served.
    failed_rounds: int
    has_given_up: bool


Pools = dict[str, PoolReport]  # by role


class UpdateReport(TypedDict):
    """State of a running update."""

    revision: int  # target revision
    phase: str  # a cluster.rollout.update.Phase
    # Reason of the rollback; empty if it is not rolling back.
    reason: str
    # Roles whose replicas are replaced.
    roles: list[str]
    # Share of requests routed to the target revision.
    share: float
    # Progress, and the condition it waits for, as text.
    step: str


class RevisionReport(TypedDict):
    number: int  # revision of the spec
    update: UpdateReport | None
    # Outcome of the previous update, one line; empty if there was none.
    last_update: str


class ControllerReport(TypedDict):
    # Current spec, including scaling since it was applied.
    spec: dict[str, Any]
    pools: Pools
    revision: RevisionReport


class Reporter(Protocol):
    """Receiver of progress from deploy() and from waits for pools."""

    def say(self, line: str) -> None: ...

    def show(self, pools: Pools) -> None:
        """Show the state of every replica. Called a few times a second."""
        ...
