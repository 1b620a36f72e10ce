"""Plain values that describe a replica to the control plane: ids and state."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import cast

from cluster.control.report import RankReport, ReplicaReport
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
    role: Role
    state: ReplicaState = ReplicaState.PENDING
    node: str = ""  # node name
    ranks: list[RankReport] = field(default_factory=list)
    blocks: Blocks = field(default_factory=lambda: Blocks(total=0, free=0, cached=0))
    running: int = 0
    waiting: int = 0
    # Current activity, or the thing it waits for.
    stage: str = ""
    fraction: float = 0.0  # of loading, 0 to 1
    # Id before its role switch; empty if it never switched.
    was: str = ""

    def report(self) -> ReplicaReport:
        """Return every field except the role, which the enclosing pool already names."""
        return cast(ReplicaReport, {key: value for key, value in asdict(self).items() if key != "role"})


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
