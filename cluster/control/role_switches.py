"""In-place role switches: which replicas may switch, and the effect on pools and desired state.

save the intent (sizes, new id of the gang) ──> the replica drains ──> its successor takes over the gang
"""

from __future__ import annotations

from collections.abc import Mapping

from cluster.control.desired_state import Desired
from cluster.control.pool import ReplicaPool
from cluster.control.pool_plan import plan_switches
from cluster.control.replica import ReplicaState, replica_id, role_of
from cluster.control.replica_lifecycle import ReplicaLifecycle
from core.types.errors import SpecError
from core.types.request import Role
from core.types.role_switch import hindrance, other


class RoleSwitches:
    """Role switches of a deployment, owned by the controller's event loop like the pools.

    Nothing here awaits; callers save the changed `desired` before they yield to the event loop.
    """

    def __init__(self, pools: Mapping[Role, ReplicaPool]) -> None:
        self._pools = pools

    def ask(self, desired: Desired, life: ReplicaLifecycle) -> str:
        """Begin the switch of a replica unless it has begun already. Returns the new id.

        Raises SpecError if the replica cannot switch.
        """
        if (successor := desired.switched.get(life.gang, life.view.id)) != life.view.id:
            # Ray repeats a call that a controller had not answered when it died.
            return successor
        self._check(desired, life)
        return self.begin(desired, life)

    def possible(self, desired: Desired, new_sizes: Mapping[Role, int]) -> list[ReplicaLifecycle]:
        """Return the replicas that can switch in place when the pools get the sizes `new_sizes`."""
        if hindrance(desired.spec):
            return []
        sizes = {role: desired.spec.pool(role).replicas for role in Role}
        found = plan_switches(new_sizes, sizes, {role: pool.views for role, pool in self._pools.items()})
        lives = {life.view.id: life for pool in self._pools.values() for life in pool.lives}
        return [lives[replica] for replica in found if _has_current_other_role(desired, role_of(replica))]

    def begin(self, desired: Desired, life: ReplicaLifecycle) -> str:
        """Start draining a serving replica for a successor in the other pool. Returns the successor's id."""
        role = life.view.role
        successor_role = other(role)
        successor = replica_id(successor_role, desired.take_number(successor_role))
        for pool, change in ((role, -1), (successor_role, 1)):
            desired.scale(pool, desired.spec.pool(pool).replicas + change)
        desired.switched[life.gang] = successor
        self._hand_over(desired, life, successor)
        return successor

    def resume(self, desired: Desired) -> None:
        """Continue pending switches after a restart of the controller."""
        lives = {life.gang: life for pool in self._pools.values() for life in pool.lives}
        for gang, successor in desired.switched.items():
            life = lives.get(gang)
            if life and life.view.id != successor and not self._pools[role_of(successor)].get(successor):
                self._hand_over(desired, life, successor)

    def forget_ended(self, desired: Desired) -> bool:
        """Drop records of replicas that have left. Returns whether there were any."""
        alive = {replica for pool in self._pools.values() for replica in pool.ids}
        ended = [gang for gang, replica in desired.switched.items() if replica not in alive]
        for gang in ended:
            del desired.switched[gang]
        return bool(ended)

    def _check(self, desired: Desired, life: ReplicaLifecycle) -> None:
        replica, role, spec = life.view.id, life.view.role, desired.spec
        if life.view.state is not ReplicaState.READY:
            raise SpecError(f"{replica} is {life.view.state}: only a ready replica can switch its role")
        if role is Role.DECODE and sum(view.state is ReplicaState.READY for view in self._pools[role].views) < 2:
            raise SpecError(f"{replica} is the only ready decode replica: no other could continue its sequences")
        if not _has_current_other_role(desired, role):
            raise SpecError(
                f"{replica} was started before an update changed the {other(role)} pool: `cluster update --restart` "
                "replaces all, or `cluster scale` both pools"
            )
        if reason := hindrance(spec):
            raise SpecError(f"{replica} cannot switch to {other(role)} in place: {reason}")

    def _hand_over(self, desired: Desired, life: ReplicaLifecycle, successor: str) -> None:
        new = ReplicaLifecycle(successor, desired, was=life.view.id)
        self._pools[new.view.role].add(new)
        self._pools[life.view.role].retire(life.view.id, successor=new)


def _has_current_other_role(desired: Desired, role: Role) -> bool:
    """Return whether this role's replicas know the other role's current settings, by their revision."""
    return desired.makes[role] >= desired.makes[other(role)]
