"""Update plan: at each step one revision is complete, and the update ends; and bounds on the new revision."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.rollout.update_plan import (
    MIN_REQUESTS,
    ReplicaCount,
    RoleView,
    is_at_end,
    next_step,
    problem_of,
    surge_of,
)
from core.types.request import Role
from core.types.revisions import RevisionCounts

OLD, NEW = 0, 1


@dataclass
class _World:
    """States of the replicas of two revisions, on nodes with a limited number of places per role."""

    targets: dict[Role, tuple[int, int]]  # old, new
    places: dict[Role, int]
    random: Random
    replicas: dict[tuple[Role, int], list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for role, (old, _) in self.targets.items():
            self.replicas |= {(role, OLD): ["ready"] * old, (role, NEW): []}

    def count_of(self, role: Role, revision: int) -> ReplicaCount:
        return ReplicaCount(**Counter(self.replicas[role, revision]))

    def all_of(self, role: Role) -> list[str]:
        return self.replicas[role, OLD] + self.replicas[role, NEW]

    def views(self, *, is_back: bool = False) -> dict[Role, RoleView]:
        leaving, candidate = (NEW, OLD) if is_back else (OLD, NEW)
        return {
            role: RoleView(
                leaving=self.count_of(role, leaving),
                candidate=self.count_of(role, candidate),
                leaving_target=targets[leaving],
                candidate_target=targets[candidate],
                # Pending replicas count, too.
                room=max(0, self.places[role] - len(self.all_of(role))),
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
        number = self.random.randrange(len(there))
        num_placed = sum(state != "pending" for state in self.all_of(role))
        if there[number] == "pending" and num_placed < self.places[role]:
            there[number] = "starting"
        elif there[number] == "starting":
            there[number] = "ready"
        elif there[number] == "draining":
            del there[number]

    def is_whole(self) -> bool:
        return any(
            all(self.count_of(role, each).ready >= min(1, targets[each]) for role, targets in self.targets.items())
            for each in (OLD, NEW)
        )

    def _set(self, role: Role, revision: int, count: int) -> None:
        there = self.replicas[role, revision]
        order = ["pending", "starting", "ready"]
        staying = sorted((state for state in there if state != "draining"), key=order.index)
        surplus = max(0, len(staying) - count)
        draining = there.count("draining") + staying[:surplus].count("ready")
        missing = count - len(staying)
        self.replicas[role, revision] = ["draining"] * draining + staying[surplus:] + ["pending"] * missing


@pytest.mark.parametrize(("replicas", "surge"), [(1, 1), (3, 1), (4, 1), (7, 1), (8, 2), (16, 4)])
def test_surge_is_a_quarter(replicas: int, surge: int) -> None:
    assert surge_of(replicas) == surge


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
        assert all(len(world.all_of(role)) <= most[role] for role in Role), world

    for _ in range(num_rolled):
        step(is_trial=is_trial)
    for is_back in (True, False):
        for _ in range(2000):
            if is_at_end(world.views(is_back=is_back)):
                break
            step(is_back=is_back)
        assert is_at_end(world.views(is_back=is_back)), world


@pytest.mark.parametrize(
    ("size", "places", "ready", "draining", "pending"),
    [(4, 8, 4, 0, 1), (2, 2, 1, 1, 0), (1, 1, 1, 0, 0)],
    ids=["with room new replicas start first", "without room an old one leaves", "but not the last"],
)
def test_first_step(size: int, places: int, ready: int, draining: int, pending: int) -> None:
    world = _World({role: (size, size) for role in Role}, dict.fromkeys(Role, places), Random(0))
    world.carry_out()
    for role in Role:
        old, new = world.count_of(role, OLD), world.count_of(role, NEW)
        assert (old.ready, old.draining, new.pending) == (ready, draining, pending)


@pytest.mark.parametrize(
    ("leaving", "candidate", "candidate_target", "room", "is_trial", "sizes"),
    [
        (ReplicaCount(ready=4), ReplicaCount(ready=1), 1, 3, True, (4, 1)),
        (ReplicaCount(ready=4), ReplicaCount(ready=1), 1, 3, False, (0, 1)),
        (ReplicaCount(ready=2), ReplicaCount(starting=1), 4, 0, False, (3, 1)),
    ],
    ids=["canary keeps old replicas", "candidate replaces them", "failed old replica is replaced by its revision"],
)
def test_step_between_two_revisions(
    leaving: ReplicaCount,
    candidate: ReplicaCount,
    candidate_target: int,
    room: int,
    is_trial: bool,
    sizes: tuple[int, int],
) -> None:
    view = RoleView(
        leaving=leaving, candidate=candidate, leaving_target=4, candidate_target=candidate_target, room=room
    )
    step = next_step(dict.fromkeys(Role, view), is_trial=is_trial)
    assert {(one.leaving, one.candidate) for one in step.values()} == {sizes}


def _problem(old: RevisionCounts | None, new: RevisionCounts | None, *, latency: float | None = 2.0) -> str:
    return problem_of(old, new, max_error_increase=0.1, max_latency_factor=latency)


@st.composite
def _counts(draw: st.DrawFn, *, least: int = 0) -> RevisionCounts:
    attempts, answered = draw(st.integers(least, 500)), draw(st.integers(least, 500))
    ttft_s, itl_s = (answered * draw(st.floats(1e-3, 10)) for _ in range(2))
    failed = draw(st.integers(0, attempts))
    return RevisionCounts(attempts=attempts, failed=failed, answered=answered, ttft_s=ttft_s, itl_s=itl_s)


def test_more_errors_than_the_margin() -> None:
    old, bad = RevisionCounts(attempts=90, failed=9), RevisionCounts(attempts=20, failed=5)
    assert _problem(old, bad) == "5 of 20 attempts failed on the new revision, 9 of 90 on the old one"
    assert _problem(old, RevisionCounts(attempts=20, failed=4)) == "", "exactly the margin"
    assert _problem(bad, old) == _problem(None, None) == ""


def test_slower_than_the_factor() -> None:
    old = RevisionCounts(answered=100, ttft_s=10.0, itl_s=2.0)
    slow_start = RevisionCounts(answered=50, ttft_s=11.0, itl_s=1.0)
    slow_tokens = RevisionCounts(answered=50, ttft_s=5.0, itl_s=2.5)
    assert _problem(old, slow_start).startswith("mean TTFT is 220.0 ms on the new revision and 100.0 ms on the old one")
    assert _problem(old, slow_tokens).startswith("mean ITL is 50.0 ms on the new revision and 20.0 ms on the old one")
    assert _problem(old, slow_start, latency=None) == "", "latency is compared only if an operator asks for it"


@given(old=_counts(), new=_counts())
def test_few_requests_are_not_significant(old: RevisionCounts, new: RevisionCounts) -> None:
    new.attempts, new.answered = new.attempts % MIN_REQUESTS, new.answered % MIN_REQUESTS
    new.failed = min(new.failed, new.attempts)
    assert _problem(old, new) == ""


@given(counts=_counts())
def test_revision_is_not_worse_than_itself(counts: RevisionCounts) -> None:
    assert _problem(counts, counts, latency=1.0) == ""


@given(old=_counts(), new=_counts(least=MIN_REQUESTS))
def test_problem_is_monotonic_in_failures_and_delay(old: RevisionCounts, new: RevisionCounts) -> None:
    before = _problem(old, new)
    new.failed = min(new.attempts, new.failed + 1)
    new.ttft_s *= 1.1
    assert _problem(old, new) or not before
