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
    coming: ReplicaCount
    leaving_target: int  # with which it was whole
    coming_target: int  # with which it shall be
    room: int = 0  # for so many replicas of the coming one on the nodes of now, beside those that wait for it

    @property
    def surge(self) -> int:
        return surge_of(max(self.leaving_target, self.coming_target))

    @property
    def is_coming_there(self) -> bool:
        return self.coming.ready >= min(1, self.coming_target)

    @property
    def share_there(self) -> float:
        return min(1.0, self.coming.ready / self.coming_target) if self.coming_target else 1.0

    @property
    def is_short_of_room(self) -> bool:
        """The coming one cannot grow, and nothing is on its way that would let it."""
        is_idle = not (self.coming.starting or self.coming.draining or self.leaving.draining)
        return is_idle and not self.room and self.coming.ready < self.coming_target


@dataclass(frozen=True)
class Wanted:
    """Replicas of one role."""

    leaving: int
    coming: int


def surge_of(replicas: int) -> int:
    """How many more than these there may be while they are replaced."""
    return max(1, math.floor(_SURGE * replicas))


def next_step(views: Mapping[Role, RoleView], *, is_trial: bool = False) -> dict[Role, Wanted]:
    """views: of the roles that are replaced. is_trial: the coming one stays beside the other, which goes only as far as
    it must for room."""
    share = min((view.share_there for view in views.values()), default=1.0)
    is_coming_whole = all(view.is_coming_there for view in views.values())
    return {role: _wanted(view, share, is_coming_whole, is_trial) for role, view in views.items()}


def is_at_end(views: Mapping[Role, RoleView]) -> bool:
    """The coming revision has what it shall have, and of the other nothing is left."""
    return all(
        view.coming.ready >= view.coming_target
        and view.coming.staying == view.coming_target
        and not (view.leaving.staying or view.leaving.draining or view.coming.draining)
        for view in views.values()
    )


def _wanted(view: RoleView, share: float, is_coming_whole: bool, is_trial: bool) -> Wanted:
    leaving, coming = view.leaving, view.coming
    num_there = leaving.staying + leaving.draining + coming.staying + coming.draining
    most = max(view.leaving_target, view.coming_target) + view.surge
    more = max(0, min(view.room, most - num_there, view.coming_target - coming.staying))
    num_coming = min(view.coming_target, coming.staying + more)
    # One of the leaving that fails meanwhile is replaced by its like, unless the coming ones have its place.
    last = 0 if is_coming_whole else min(1, view.leaving_target)
    kept = max(leaving.staying, last, view.leaving_target - num_coming - leaving.draining)
    if is_coming_whole and not is_trial:
        kept = min(kept, math.ceil(view.leaving_target * (1 - share)))
    if not more and view.is_short_of_room and _may_spare_one(view, is_coming_whole):
        kept = min(kept, leaving.staying - 1)
    return Wanted(leaving=kept, coming=num_coming)


def _may_spare_one(view: RoleView, is_coming_whole: bool) -> bool:
    """One of the leaving makes room before another has come: the last that serves does not, and never too many do."""
    least = 0 if is_coming_whole else min(1, view.leaving_target)
    serving = view.leaving.ready + view.coming.ready
    needed = min(view.leaving_target, view.coming_target) - view.surge
    return view.leaving.staying > least and view.leaving.ready - 1 >= least and serving - 1 >= needed
