"""Replicas that change their role in place: which may, and what that is to the pools and to what is desired.

the wish is saved: sizes, and the new id of its gang ──> the replica drains ──> its gang is its heir's
"""

from __future__ import annotations

from collections.abc import Mapping

from cluster.control.desired_state import Desired
from cluster.control.pool_plan import plan_switches
from cluster.control.replica import ReplicaState, replica_id, role_of
from cluster.control.replica_lifecycle import ReplicaLifecycle
from cluster.rollout.role_pools import RolePools
from core.types.errors import SpecError
from core.types.request import Role
from core.types.role_switch import hindrance, other


class RoleSwitches:
    """Owned by the controller's event loop, as the pools are. Nothing here waits: what `desired` says after a call is
    to be saved in the same turn."""

    def __init__(self, pools: Mapping[Role, RolePools]) -> None:
        self._pools = pools

    def ask(self, desired: Desired, replica: str) -> str:
        """`begin`, unless that was done; raises SpecError where this replica, which there is or was, cannot become one
        of the other pool."""
        life = self._pools[role_of(replica)].get(replica)
        if life is None:
            raise SpecError(f"{replica} has left already")
        if (successor := desired.switched.get(life.gang, replica)) != replica:
            return successor  # as where Ray asks again, for a controller that died before it had answered
        self._check(desired, life)
        return self.begin(desired, replica)

    def possible(self, desired: Desired, wanted: Mapping[Role, int]) -> list[str]:
        """The replicas that need not be replaced where the pools are to have these sizes."""
        if hindrance(desired.spec):
            return []
        sizes = {role: desired.spec.pool(role).replicas for role in Role}
        found = plan_switches(wanted, sizes, {role: pool.views for role, pool in self._pools.items()})
        return [replica for replica in found if _knows_the_other(desired, role_of(replica))]

    def begin(self, desired: Desired, replica: str) -> str:
        """Let a replica that serves drain, for an heir in the other pool. Returns the heir's id."""
        role = role_of(replica)
        life, successor_role = self._pools[role].get(replica), other(role)
        assert life, "it serves"
        successor = replica_id(successor_role, desired.take_number(successor_role))
        for pool, change in ((role, -1), (successor_role, 1)):
            desired.scale(pool, desired.spec.pool(pool).replicas + change)
        desired.switched[life.gang] = successor
        self._hand_on(desired, life, successor)
        return successor

    def resume(self, desired: Desired) -> None:
        """After a restart of the controller: what was about to change its role goes on with that."""
        for gang, successor in desired.switched.items():
            for life in (pool.get(replica) for pool in self._pools.values() for replica in pool.ids):
                if (
                    life
                    and life.gang == gang
                    and life.view.id != successor
                    and not self._pools[role_of(successor)].get(successor)
                ):
                    self._hand_on(desired, life, successor)

    def forget_ended(self, desired: Desired) -> bool:
        """Of `desired`, what was said of replicas that have left. Whether that was anything."""
        alive = {replica for pool in self._pools.values() for replica in pool.ids}
        ended = [gang for gang, replica in desired.switched.items() if replica not in alive]
        for gang in ended:
            del desired.switched[gang]
        return bool(ended)

    def _check(self, desired: Desired, life: ReplicaLifecycle) -> None:
        replica, role, spec = life.view.id, life.view.role, desired.spec
        if life.view.state is not ReplicaState.READY:
            raise SpecError(f"{replica} is {life.view.state}: only one that is ready can change its role")
        if role is Role.DECODE and sum(view.state is ReplicaState.READY for view in self._pools[role].views) < 2:
            raise SpecError(f"{replica} is the only decode replica that is ready: nobody could go on with its answers")
        if not _knows_the_other(desired, role):
            raise SpecError(
                f"{replica} was started before an update changed the {other(role)} pool: `cluster update --restart` "
                "replaces all, or `cluster scale` both pools"
            )
        if reason := hindrance(spec):
            raise SpecError(f"{replica} cannot become a {other(role)} replica as it is: {reason}")

    def _hand_on(self, desired: Desired, life: ReplicaLifecycle, successor: str) -> None:
        new = ReplicaLifecycle(successor, desired, was=life.view.id)
        self._pools[new.view.role].add(new)
        self._pools[life.view.role].retire(life.view.id, successor=new)


def _knows_the_other(desired: Desired, role: Role) -> bool:
    """Whether what this role's replicas were started with says of the other role what holds now."""
    return desired.makes[role] >= desired.makes[other(role)]
