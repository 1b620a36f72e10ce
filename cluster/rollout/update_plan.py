"""Replica counts of two revisions at each step of an update, and bounds on the new one's errors and latency. Pure.

    leaving    the revision that is replaced; during a rollback, the new one
    candidate  the revision that replaces it

Stateless: each call derives the next step from the current replicas, whatever failed or returned since. At each step
one revision is complete, with a serving prefill and a serving decode replica, unless replicas are lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from core.types.request import Role
from core.types.revisions import RevisionCounts

# Share of a pool's size that may run in addition while replicas are replaced.
_SURGE = 0.25
# Fewer requests are not significant for a comparison of two revisions.
MIN_REQUESTS = 20


@dataclass(frozen=True, kw_only=True)
class ReplicaCount:
    """Number of replicas of one role and one revision, by state."""

    # Serving long enough for routers to have seen it.
    ready: int = 0
    # Placed, or serving too briefly for routers to have seen it.
    starting: int = 0
    # Waiting for room.
    pending: int = 0
    draining: int = 0

    @property
    def staying(self) -> int:
        return self.ready + self.starting + self.pending


@dataclass(frozen=True, kw_only=True)
class RoleView:
    """Replicas of both revisions of one role during an update."""

    leaving: ReplicaCount
    candidate: ReplicaCount
    # Size before the update.
    leaving_target: int
    # Size after the update.
    candidate_target: int
    # Additional candidate replicas that fit on the current nodes, besides pending ones.
    room: int = 0

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
        """True if the candidate cannot grow and no starting or draining replica will change that."""
        is_idle = not (self.candidate.starting or self.candidate.draining or self.leaving.draining)
        return is_idle and not self.room and self.candidate.ready < self.candidate_target


@dataclass(frozen=True)
class TargetSizes:
    """Target number of replicas of one role."""

    leaving: int
    candidate: int


def surge_of(replicas: int) -> int:
    """Return how many replicas may run in addition while these are replaced."""
    return max(1, math.floor(_SURGE * replicas))


def next_step(views: Mapping[Role, RoleView], *, is_trial: bool = False) -> dict[Role, TargetSizes]:
    """Return the target sizes of the next step.

    views: the replaced roles. is_trial: the candidate is a canary; the other revision shrinks only to make room for it.
    """
    share = min((view.share_there for view in views.values()), default=1.0)
    is_candidate_complete = all(view.is_candidate_ready for view in views.values())
    return {role: _targets(view, share, is_candidate_complete, is_trial) for role, view in views.items()}


def is_at_end(views: Mapping[Role, RoleView]) -> bool:
    """Return whether the candidate is complete and nothing of the other revision is left."""
    return all(
        view.candidate.ready >= view.candidate_target
        and view.candidate.staying == view.candidate_target
        and not (view.leaving.staying or view.leaving.draining or view.candidate.draining)
        for view in views.values()
    )


def _targets(view: RoleView, share: float, is_candidate_complete: bool, is_trial: bool) -> TargetSizes:
    leaving, candidate = view.leaving, view.candidate
    num_there = leaving.staying + leaving.draining + candidate.staying + candidate.draining
    most = max(view.leaving_target, view.candidate_target) + view.surge
    more = max(0, min(view.room, most - num_there, view.candidate_target - candidate.staying))
    num_candidate = min(view.candidate_target, candidate.staying + more)
    # A leaving replica that fails is replaced by its own revision, unless a candidate has taken its place.
    last = 0 if is_candidate_complete else min(1, view.leaving_target)
    num_leaving = max(leaving.staying, last, view.leaving_target - num_candidate - leaving.draining)
    if is_candidate_complete and not is_trial:
        num_leaving = min(num_leaving, math.ceil(view.leaving_target * (1 - share)))
    if not more and view.is_short_of_room and _may_spare_one(view, is_candidate_complete):
        num_leaving = min(num_leaving, leaving.staying - 1)
    return TargetSizes(leaving=num_leaving, candidate=num_candidate)


def _may_spare_one(view: RoleView, is_candidate_complete: bool) -> bool:
    """Return whether a leaving replica may make room before its replacement serves.

    The last serving one may not, and the number of serving replicas keeps its lower limit.
    """
    least = 0 if is_candidate_complete else min(1, view.leaving_target)
    serving = view.leaving.ready + view.candidate.ready
    needed = min(view.leaving_target, view.candidate_target) - view.surge
    return view.leaving.staying > least and view.leaving.ready - 1 >= least and serving - 1 >= needed


def problem_of(
    old: RevisionCounts | None,
    new: RevisionCounts | None,
    *,
    max_error_increase: float,
    max_latency_factor: float | None,
) -> str:
    """Return why the new revision must be rolled back, in one line, or "" if it may stay.

    Its error rate may exceed the old one's by `max_error_increase` (0.1: ten percentage points); an old revision
    without requests counts as free of errors. Its mean TTFT and mean ITL may be at most `max_latency_factor` times the
    old one's; None: latency is not compared. Each bound applies from MIN_REQUESTS requests on.
    """
    old, new = old or RevisionCounts(), new or RevisionCounts()
    if new.attempts >= MIN_REQUESTS and _rate(new) > _rate(old) + max_error_increase:
        return (
            f"{new.failed} of {new.attempts} attempts failed on the new revision, "
            f"{old.failed} of {old.attempts} on the old one"
        )
    if max_latency_factor is None or min(old.answered, new.answered) < MIN_REQUESTS:
        return ""
    for name, old_sum_s, new_sum_s in (("TTFT", old.ttft_s, new.ttft_s), ("ITL", old.itl_s, new.itl_s)):
        old_s, new_s = old_sum_s / old.answered, new_sum_s / new.answered
        if new_s > old_s * max_latency_factor:
            return (
                f"mean {name} is {new_s * 1e3:.1f} ms on the new revision and {old_s * 1e3:.1f} ms on the old one, "
                f"more than {max_latency_factor:g} times as much"
            )
    return ""


def _rate(counts: RevisionCounts) -> float:
    return counts.failed / counts.attempts if counts.attempts else 0.0
