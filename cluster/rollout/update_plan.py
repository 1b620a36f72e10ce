"""How many replicas of each of two revisions there should be now, on the way from one to the other. Pure.

    leaving    the revision that an update takes away; when it is taken back, the new one
    coming     the one that takes its place

It is asked again and again, and remembers nothing: whatever has failed, left or come back meanwhile, what it answers is
a step from there. At each step one of the two is whole, with a prefill and a decode replica that serve, as long as
nothing but this takes replicas away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from core.types.request import Role

_SURGE = 0.25  # of a pool, beyond its size: replicas that are there beside those that they replace


@dataclass(frozen=True, kw_only=True)
class ReplicaCount:
    """The replicas of one role and one revision."""

    ready: int = 0  # they serve, and routers have had the time to see it
    starting: int = 0  # placed, or ready just now
    pending: int = 0  # wait for room
    draining: int = 0

    @property
    def staying(self) -> int:
        return self.ready + self.starting + self.pending


@dataclass(frozen=True, kw_only=True)
class RoleView:
    """One role that both revisions have replicas of their own of."""

    leaving: ReplicaCount
    candidate: ReplicaCount
    leaving_target: int  # with which it was whole
    candidate_target: int  # with which it shall be
    room: int = 0  # for so many replicas of the coming one on the nodes of now, beside those that wait for it

    @property
    def surge(self) -> int:
        return surge_of(max(self.leaving_target, self.candidate_target))

    @property
    def is_candidate_ready(self) -> bool:
        return self.candidate.ready >= min(1, self.candidate_target)

    @property
    def share_there(self) -> float:
        return min(1.0, self.candidate.ready / self.candidate_target) if self.candidate_target else 1.0

    @property
    def is_short_of_room(self) -> bool:
        """The coming one cannot grow, and nothing is on its way that would let it."""
        is_idle = not (self.candidate.starting or self.candidate.draining or self.leaving.draining)
        return is_idle and not self.room and self.candidate.ready < self.candidate_target


@dataclass(frozen=True)
class TargetSizes:
    """Replicas of one role."""

    leaving: int
    candidate: int


def surge_of(replicas: int) -> int:
    """How many more than these there may be while they are replaced."""
    return max(1, math.floor(_SURGE * replicas))


def next_step(views: Mapping[Role, RoleView], *, is_trial: bool = False) -> dict[Role, TargetSizes]:
    """views: of the roles that are replaced. is_trial: the coming one stays beside the other, which goes only as far as
    it must for room."""
    share = min((view.share_there for view in views.values()), default=1.0)
    is_candidate_complete = all(view.is_candidate_ready for view in views.values())
    return {role: _wanted(view, share, is_candidate_complete, is_trial) for role, view in views.items()}


def is_at_end(views: Mapping[Role, RoleView]) -> bool:
    """The coming revision has what it shall have, and of the other nothing is left."""
    return all(
        view.candidate.ready >= view.candidate_target
        and view.candidate.staying == view.candidate_target
        and not (view.leaving.staying or view.leaving.draining or view.candidate.draining)
        for view in views.values()
    )


def _wanted(view: RoleView, share: float, is_candidate_complete: bool, is_trial: bool) -> TargetSizes:
    leaving, candidate = view.leaving, view.candidate
    num_there = leaving.staying + leaving.draining + candidate.staying + candidate.draining
    most = max(view.leaving_target, view.candidate_target) + view.surge
    more = max(0, min(view.room, most - num_there, view.candidate_target - candidate.staying))
    num_candidate = min(view.candidate_target, candidate.staying + more)
    # One of the leaving that fails meanwhile is replaced by its like, unless the coming ones have its place.
    last = 0 if is_candidate_complete else min(1, view.leaving_target)
    kept = max(leaving.staying, last, view.leaving_target - num_candidate - leaving.draining)
    if is_candidate_complete and not is_trial:
        kept = min(kept, math.ceil(view.leaving_target * (1 - share)))
    if not more and view.is_short_of_room and _may_spare_one(view, is_candidate_complete):
        kept = min(kept, leaving.staying - 1)
    return TargetSizes(leaving=kept, candidate=num_candidate)


def _may_spare_one(view: RoleView, is_candidate_complete: bool) -> bool:
    """One of the leaving makes room before another has come: the last that serves does not, and never too many do."""
    least = 0 if is_candidate_complete else min(1, view.leaving_target)
    serving = view.leaving.ready + view.candidate.ready
    needed = min(view.leaving_target, view.candidate_target) - view.surge
    return view.leaving.staying > least and view.leaving.ready - 1 >= least and serving - 1 >= needed
