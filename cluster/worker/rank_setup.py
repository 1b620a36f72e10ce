"""What one rank of a replica is put together with, whatever its role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.wire.rank_host import RankHost
from cluster.words.credentials import Credentials
from cluster.words.probe import Probe, unobserved
from cluster.words.request import Role
from cluster.words.spec import PoolSpec, Spec


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """Its place in the deployment, and in its own process."""

    spec: Spec
    role: Role
    replica: str
    rank: int
    addresses: list[str]  # of all ranks of this replica, in rank order
    index_url: str
    credentials: Credentials
    host: RankHost
    on_progress: Callable[[str, float], None]  # stage, fraction of the whole load
    probe: Probe = unobserved

    @property
    def pool(self) -> PoolSpec:
        """The replicas of this role."""
        return self.spec.pool(self.role)
