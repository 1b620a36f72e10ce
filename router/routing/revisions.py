"""Which revision of a deployment serves a request, while there are several. Pure.

A prefill and a decode replica meet within one revision only. Which one a request goes to is told by a hash of its user
or, where it names none, of its id: as the share of a new revision grows, whoever had it before keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from hashlib import blake2b
from typing import TypeVar

from core.types.request import SequenceRequest
from core.types.revisions import Revision, RevisionCounts, RevisionTable

T = TypeVar("T")

_POINTS = 2**32


class Revisions:
    """What a router has been told of them. Owned by its event loop."""

    def __init__(self) -> None:
        self._table = RevisionTable()
        self.counts: dict[int, RevisionCounts] = {}  # by revision, of this update

    def take(self, table: RevisionTable) -> None:
        """From now on."""
        numbers = {one.number for one in table.revisions}
        if numbers != {one.number for one in self._table.revisions}:
            self.counts = {number: RevisionCounts() for number in numbers}
        self._table = table

    def count(self, number: int | None) -> RevisionCounts:
        """To be added to; of one that there is not, it is lost."""
        return self.counts.get(number or 0) or RevisionCounts()

    @property
    def is_split(self) -> bool:
        """Whether there are several; else nothing here matters."""
        return len(self._table.revisions) > 1

    @property
    def all(self) -> Sequence[Revision]:
        return self._table.revisions

    def first_to_last(self, request: SequenceRequest, *, usable: Iterable[str]) -> Sequence[Revision | None]:
        """Which may serve a request that nobody has served yet: that whose turn it is, then those that take more. None:
        all replicas are of one.

        usable: decode replicas; a revision without any has no turn.
        """
        if not self.is_split:
            return [None]
        there = set(usable)
        living = [one for one in self._newest_first() if not one.replicas.isdisjoint(there)]
        own = _at(living, _point(request)) or (living[0] if living else None)
        return [one for one in living if one is own] + [one for one in living if one is not own and one.takes_more]

    def after(self, number: int | None, *, untried: Set[str]) -> Sequence[Revision | None]:
        """Which may go on with a request that this one has served: itself, then those that give the same tokens, then
        the others, for an answer that changes its revision is worth more than none. None: all replicas are of one.

        untried: decode replicas that have not failed it; revisions without any come last.
        """
        if not self.is_split:
            return [None]
        oldest = min(self.all, key=lambda one: one.number)  # was there before anybody told revisions apart
        mine = next((one for one in self.all if one.number == number), oldest)
        return sorted(
            self._newest_first(),
            key=lambda one: (one.replicas.isdisjoint(untried), one is not mine, one.tokens != mine.tokens),
        )

    def meet(self, one: str, other: str) -> bool:
        """Whether these replicas are of one revision."""
        return not self.is_split or any({one, other} <= revision.replicas for revision in self._table.revisions)

    def may_move(self, source: str, target: str) -> bool:
        """Whether a running answer may move from this replica to that one."""
        return not self.is_split or not self._kinds(source).isdisjoint(self._kinds(target))

    def apart(self, things: Sequence[T], replica_of: Callable[[T], str]) -> list[list[T]]:
        """In groups of those whose replicas belong to the same revisions."""
        groups: dict[frozenset[int], list[T]] = {}
        for thing in things:
            numbers = frozenset(one.number for one in self.all if replica_of(thing) in one.replicas)
            groups.setdefault(numbers, []).append(thing)
        return list(groups.values())

    def _kinds(self, replica: str) -> set[str]:
        return {revision.kind for revision in self._table.revisions if replica in revision.replicas}

    def _newest_first(self) -> list[Revision]:
        return sorted(self._table.revisions, key=lambda one: -one.number)


def _at(revisions: Sequence[Revision], point: float) -> Revision | None:
    """At this point of all their shares, of which 0 is where the newest begins."""
    end = 0.0
    for one in revisions:
        end += one.share
        if point < end:
            return one
    return None


def _point(request: SequenceRequest) -> float:
    """From 0 up to 1; the same for all requests of a user."""
    key = f"{request.tenant}\n{request.user}" if request.user else request.id
    return int.from_bytes(blake2b(key.encode(), digest_size=4).digest()) / _POINTS
