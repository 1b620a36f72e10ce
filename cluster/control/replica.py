"""Replicas in the control plane: ids, states, and the reports of pools that `cluster status --json` prints."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypedDict, cast

from core.types.rank_api import Blocks
from core.types.request import Role

_RANK_NAME = re.compile(r"(?P<replica>(prefill|decode)-[0-9]+)-r(?P<rank>[0-9]+)")


class ReplicaState(StrEnum):
    """State of a replica: PENDING -> STARTING -> LOADING -> READY -> DRAINING -> gone. A failed replica is replaced."""

    # Waits for a node with room.
    PENDING = "pending"
    # Its processes are starting.
    STARTING = "starting"
    # Its ranks are loading weights.
    LOADING = "loading"
    READY = "ready"
    # Takes no new requests; finishes or hands over the ones it has.
    DRAINING = "draining"


@dataclass
class ReplicaStatus:
    """Status of a replica as `cluster status` shows it."""

    id: str
    state: ReplicaState = ReplicaState.PENDING
    # Node name; empty before placement.
    node: str = ""
    ranks: list[RankReport] = field(default_factory=list)
    blocks: Blocks = field(default_factory=lambda: Blocks(total=0, free=0, cached=0))
    running: int = 0  # sequences
    waiting: int = 0
    # Current activity, or the thing it waits for.
    stage: str = ""
    fraction: float = 0.0  # of loading, 0 to 1
    # Id before its role switch; empty if it never switched.
    was: str = ""
    # Revision that it was started from; its pool sets it.
    revision: int = 1

    @property
    def role(self) -> Role:
        return role_of(self.id)

    def report(self) -> ReplicaReport:
        return cast(ReplicaReport, asdict(self))


def replica_id(role: Role, number: int) -> str:
    return f"{role}-{number}"


def rank_name(replica: str, rank: int) -> str:
    """Return the name of a rank's actor, unique in the deployment's namespace."""
    return f"{replica}-r{rank}"


def parse_rank_name(name: str) -> tuple[str, int] | None:
    """Return (replica, rank) of a rank's actor name, or None for any other name."""
    match = _RANK_NAME.fullmatch(name)
    return (match["replica"], int(match["rank"])) if match else None


def role_of(replica: str) -> Role:
    return Role(replica.partition("-")[0])


def number_of(replica: str) -> int:
    return int(replica.rpartition("-")[2])


class RankReport(TypedDict):
    pid: int
    device: str  # "cpu", "cuda:0"


class ReplicaReport(TypedDict):
    """Fields of ReplicaStatus."""

    id: str
    state: str
    node: str
    ranks: list[RankReport]
    blocks: Blocks
    running: int
    waiting: int
    stage: str
    fraction: float
    was: str
    revision: int


class FailureReport(TypedDict):
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
