"""Update plan: at each step one revision is complete, and the update ends, even if the controller restarts."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.rollout.update_plan import ReplicaCount, RoleView, is_at_end, next_step, surge_of
from core.types.request import Role

OLD, NEW = 0, 1


@dataclass
class _Replica:
    state: str = "pending"  # pending, starting, ready, draining


@dataclass
class _World:
    """Replicas of two revisions on nodes with a limited number of places per role."""

    targets: dict[Role, tuple[int, int]]  # old, new
    places: dict[Role, int]
    random: Random
    replicas: dict[tuple[Role, int], list[_Replica]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for role, (old, _) in self.targets.items():
            self.replicas[role, OLD] = [_Replica("ready") for _ in range(old)]
            self.replicas[role, NEW] = []

    def count_of(self, role: Role, revision: int) -> ReplicaCount:
        counts = dict.fromkeys(("ready", "starting", "pending", "draining"), 0)
        for replica in self.replicas[role, revision]:
            counts[replica.state] += 1
        return ReplicaCount(**counts)

    def room(self, role: Role) -> int:
        taken = sum(len(self.replicas[role, revision]) for revision in (OLD, NEW))
        # Pending replicas count, too.
        return max(0, self.places[role] - taken)

    def views(self, *, is_back: bool = False) -> dict[Role, RoleView]:
        leaving, candidate = (NEW, OLD) if is_back else (OLD, NEW)
        return {
            role: RoleView(
                leaving=self.count_of(role, leaving),
                candidate=self.count_of(role, candidate),
                leaving_target=targets[leaving],
                candidate_target=targets[candidate],
                room=self.room(role),
            )
            for role, targets in self.targets.items()
        }

    def carry_out(self, *, is_back: bool = False, is_trial: bool = False) -> None:
        """Apply one stateless reconcile of the controller."""
        leaving, candidate = (NEW, OLD) if is_back else (OLD, NEW)
        for role, targets_now in next_step(self.views(is_back=is_back), is_trial=is_trial).items():
            self._set(role, leaving, targets_now.leaving)
            self._set(role, candidate, targets_now.candidate)

    def happen(self) -> None:
        """Change the state of a random replica."""
        role, revision = self.random.choice(list(self.replicas))
        there = self.replicas[role, revision]
        if not there:
            return
        replica = self.random.choice(there)
        placed = sum(one.state != "pending" for each in (OLD, NEW) for one in self.replicas[role, each])
        if replica.state == "pending" and placed < self.places[role]:
            replica.state = "starting"
        elif replica.state == "starting":
            replica.state = "ready"
        elif replica.state == "draining":
            there.remove(replica)

    def is_whole(self) -> bool:
        return any(
            all(
                self.count_of(role, revision).ready >= min(1, targets[revision])
                for role, targets in self.targets.items()
            )
            for revision in (OLD, NEW)
        )

    def num(self, role: Role) -> int:
        return sum(len(self.replicas[role, revision]) for revision in (OLD, NEW))

    def _set(self, role: Role, revision: int, count: int) -> None:
        there = self.replicas[role, revision]
        order = ["pending", "starting", "ready"]
        staying = sorted((one for one in there if one.state != "draining"), key=lambda one: order.index(one.state))
        for replica in staying[: max(0, len(staying) - count)]:
            if replica.state == "ready":
                replica.state = "draining"
            else:
                there.remove(replica)
        there += [_Replica() for _ in range(count - len(staying))]


_SIZES = st.integers(1, 5)


@given(
    sizes=st.fixed_dictionaries({role: st.tuples(_SIZES, _SIZES) for role in Role}),
    spare=st.fixed_dictionaries({role: st.integers(0, 4) for role in Role}),
    seed=st.integers(0, 2**32),
    num_rolled=st.integers(0, 60),
    is_trial=st.booleans(),
)
def test_a_complete_revision_serves_at_each_step_until_the_end(
    sizes: dict[Role, tuple[int, int]], spare: dict[Role, int], seed: int, num_rolled: int, is_trial: bool
) -> None:
    """The update runs for a while, is rolled back at any moment, and resumed at any moment of the rollback."""
    places = {role: max(sizes[role]) + spare[role] for role in Role}
    if any(not spare[role] and sizes[role][OLD] == 1 for role in Role):
        # Otherwise an update would be rejected.
        places = {role: count + 1 for role, count in places.items()}
    world = _World(sizes, places, Random(seed))
    most = {role: max(sizes[role]) + surge_of(max(sizes[role])) for role in Role}

    def step(*, is_back: bool = False, is_trial: bool = False) -> None:
        world.carry_out(is_back=is_back, is_trial=is_trial)
        assert world.is_whole(), world
        world.happen()
        assert world.is_whole(), world
        assert all(world.num(role) <= most[role] for role in Role), world

    for _ in range(num_rolled):
        step(is_trial=is_trial)
    for is_back in (True, False):
        for _ in range(2000):
            if is_at_end(world.views(is_back=is_back)):
                break
            step(is_back=is_back)
        assert is_at_end(world.views(is_back=is_back)), world


def test_with_room_new_replicas_start_first() -> None:
    world = _World({role: (4, 4) for role in Role}, dict.fromkeys(Role, 8), Random(0))
    world.carry_out()
    assert all((world.count_of(role, OLD).ready, world.count_of(role, NEW).pending) == (4, 1) for role in Role)


def test_without_room_an_old_replica_leaves_but_not_the_last() -> None:
    two = _World({role: (2, 2) for role in Role}, dict.fromkeys(Role, 2), Random(0))
    two.carry_out()
    assert all((two.count_of(role, OLD).ready, two.count_of(role, OLD).draining) == (1, 1) for role in Role)
    one = _World({role: (1, 1) for role in Role}, dict.fromkeys(Role, 1), Random(0))
    one.carry_out()
    assert all(one.count_of(role, OLD).ready == 1 for role in Role)


def test_canary_keeps_old_replicas() -> None:
    views = {
        role: RoleView(
            leaving=ReplicaCount(ready=4), candidate=ReplicaCount(ready=1), leaving_target=4, candidate_target=1, room=3
        )
        for role in Role
    }
    assert all((one.leaving, one.candidate) == (4, 1) for one in next_step(views, is_trial=True).values())
    assert all((one.leaving, one.candidate) == (0, 1) for one in next_step(views).values())


def test_failed_old_replica_is_replaced_by_its_revision() -> None:
    views = {
        role: RoleView(
            leaving=ReplicaCount(ready=2),
            candidate=ReplicaCount(starting=1),
            leaving_target=4,
            candidate_target=4,
            room=0,
        )
        for role in Role
    }
    assert all(one.leaving == 3 for one in next_step(views).values())


@pytest.mark.parametrize("replicas", [1, 3, 4, 16])
def test_surge_is_bounded(replicas: int) -> None:
    assert surge_of(replicas) == max(1, replicas // 4)
