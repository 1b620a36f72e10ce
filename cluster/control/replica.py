"""A replica as the control plane sees it: its state, its ranks, and how it failed. Plain values; nothing runs here."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import cast

from cluster.control.report import FailureReport, RankReport, ReplicaReport
from core.types.rank_api import Blocks
from core.types.request import Role

_RANK_NAME = re.compile(r"(?P<replica>(prefill|decode)-[0-9]+)-r(?P<rank>[0-9]+)")


class ReplicaState(StrEnum):
    """PENDING -> STARTING -> LOADING -> READY -> DRAINING -> gone. One that failed is gone, too, and replaced."""

    PENDING = "pending"  # waits for a node with room
    STARTING = "starting"  # its processes start
    LOADING = "loading"  # it loads weights
    READY = "ready"
    DRAINING = "draining"  # takes no new requests, finishes those that it has or hands them over


@dataclass
class ReplicaStatus:
    """What `cluster status` shows of a replica."""

    id: str
    role: Role
    state: ReplicaState = ReplicaState.PENDING
    node: str = ""  # the node's name
    ranks: list[RankReport] = field(default_factory=list)
    blocks: Blocks = field(default_factory=lambda: Blocks(total=0, free=0, cached=0))
    running: int = 0
    waiting: int = 0
    stage: str = ""  # what it does at present, or waits for
    fraction: float = 0.0  # of loading
    was: str = ""  # the id that it had in the other pool, where it has changed its role

    def report(self) -> ReplicaReport:
        """Everything but the role, under which the pools list it anyway."""
        return cast(ReplicaReport, {key: value for key, value in asdict(self).items() if key != "role"})


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a replica ended that should not have."""

    replica: str
    role: Role
    state: ReplicaState  # when it happened
    node: str
    reason: str
    will_repeat: bool  # another try will hardly end otherwise

    def report(self) -> FailureReport:
        return cast(FailureReport, asdict(self) | {"text": self.describe()})

    def describe(self) -> str:
        where = f" on {self.node}" if self.node else ""
        what = "failed" if self.state in (ReplicaState.READY, ReplicaState.DRAINING) else "did not start"
        return f"{self.replica}{where} {what} ({self.state}): {self.reason}"


def replica_id(role: Role, number: int) -> str:
    return f"{role}-{number}"


def rank_name(replica: str, rank: int) -> str:
    """The name of a rank's actor, unique in the deployment's namespace."""
    return f"{replica}-r{rank}"


def parse_rank_name(name: str) -> tuple[str, int] | None:
    """(replica, rank) of a rank's actor; None for any other name."""
    match = _RANK_NAME.fullmatch(name)
    return (match["replica"], int(match["rank"])) if match else None


def role_of(replica: str) -> Role:
    return Role(replica.partition("-")[0])


def number_of(replica: str) -> int:
    return int(replica.rpartition("-")[2])
