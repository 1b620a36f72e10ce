"""Choice of the revision that serves a request while a deployment is updated. Pure.

A prefill and a decode replica are paired within one revision only. A hash of the request's user, or of its id if it
has no user, selects the revision. So a user who was on a new revision stays there as its share grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from hashlib import blake2b

from core.types.request import SequenceRequest
from core.types.revisions import Revision, RevisionCounts, RevisionTable

_POINTS = 2**32


class Revisions:
    """Revisions that the controller has announced to a router. Owned by the router's event loop."""

    def __init__(self) -> None:
        self._table = RevisionTable()
        self.counts: dict[int, RevisionCounts] = {}  # by revision number, since this update began

    def take(self, table: RevisionTable) -> None:
        """Replace the revision table. Counts restart when the set of revisions changes."""
        numbers = {revision.number for revision in table.revisions}
        if numbers != {revision.number for revision in self._table.revisions}:
            self.counts = {number: RevisionCounts() for number in numbers}
        self._table = table

    def count(self, number: int | None) -> RevisionCounts:
        """Return the counters of a revision, for the caller to increment. Counts of an unknown revision are dropped."""
        return self.counts.get(number or 0) or RevisionCounts()

    @property
    def is_split(self) -> bool:
        """True while several revisions serve. Otherwise all replicas belong to one revision."""
        return len(self._table.revisions) > 1

    @property
    def all(self) -> Sequence[Revision]:
        return self._table.revisions

    def for_new_request(self, request: SequenceRequest, *, usable: Iterable[str]) -> Sequence[Revision | None]:
        """Return the revisions that may serve a new request, in order of preference; [None] while there is only one.

        The revision that the request's hash selects comes first, then those that accept overflow.
        usable: decode replicas in service; a revision without one is skipped.
        """
        if not self.is_split:
            return [None]
        usable = set(usable)
        available = [revision for revision in self._newest_first() if not revision.replicas.isdisjoint(usable)]
        own = _revision_at(available, _point(request)) or (available[0] if available else None)
        others = [revision for revision in available if revision is not own and revision.takes_more]
        return ([own] if own else []) + others

    def for_continuation(self, number: int | None, *, untried: Set[str]) -> Sequence[Revision | None]:
        """Return the revisions that may continue a request of revision `number`; [None] while there is only one.

        Revision `number` comes first, then those that generate the same tokens, then all others: a changed answer is
        better than none. untried: decode replicas that have not failed the request; revisions without one come last.
        """
        if not self.is_split:
            return [None]
        # Requests that began before the update carry no revision number: they ran on the oldest revision.
        oldest = min(self.all, key=lambda one: one.number)
        mine = next((one for one in self.all if one.number == number), oldest)
        return sorted(
            self._newest_first(),
            key=lambda one: (one.replicas.isdisjoint(untried), one is not mine, one.tokens != mine.tokens),
        )

    def in_one_revision(self, one: str, other: str) -> bool:
        """Return whether both replicas belong to the same revision."""
        return not self.is_split or any({one, other} <= revision.replicas for revision in self._table.revisions)

    def may_move(self, source: str, target: str) -> bool:
        """Return whether a running answer may move from `source` to `target`."""
        return not self.is_split or not self._kinds(source).isdisjoint(self._kinds(target))

    def group(self, replicas: Iterable[str]) -> list[list[str]]:
        """Group the replicas by the revisions to which they belong."""
        groups: dict[frozenset[int], list[str]] = {}
        for replica in replicas:
            numbers = frozenset(one.number for one in self.all if replica in one.replicas)
            groups.setdefault(numbers, []).append(replica)
        return list(groups.values())

    def _kinds(self, replica: str) -> set[str]:
        return {revision.kind for revision in self._table.revisions if replica in revision.replicas}

    def _newest_first(self) -> list[Revision]:
        return sorted(self._table.revisions, key=lambda one: -one.number)


def _revision_at(revisions: Sequence[Revision], point: float) -> Revision | None:
    """Return the revision whose share covers `point`. The shares are laid end to end from 0, in the given order."""
    end = 0.0
    for one in revisions:
        end += one.share
        if point < end:
            return one
    return None


def _point(request: SequenceRequest) -> float:
    """Hash a request into [0, 1). All requests of one user get the same value."""
    key = f"{request.tenant}\n{request.user}" if request.user else request.id
    return int.from_bytes(blake2b(key.encode(), digest_size=4).digest()) / _POINTS
