"""Parameters of one rank of any role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from core.spec.schema import PoolSpec, Spec
from core.types.failpoint import Failpoint, unobserved
from core.types.launch import Launch
from core.types.request import Role
from core.wire.rank_server import RankHost


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """Deployment parameters and process resources of one rank."""

    launch: Launch
    role: Role
    addresses: list[str]  # all ranks of this replica, in rank order
    host: RankHost
    on_progress: Callable[[str, float], None]  # stage, fraction of the whole load
    failpoint: Failpoint = unobserved

    @property
    def spec(self) -> Spec:
        return self.launch.spec

    @property
    def replica(self) -> str:
        return self.host.identity.name.replica

    @property
    def rank(self) -> int:
        return self.host.identity.name.rank

    @property
    def pool(self) -> PoolSpec:
        """Spec of this role's replicas."""
        return self.spec.pool(self.role)
