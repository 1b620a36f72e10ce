"""Record of a router's last routing decisions, with the costs that led to them."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from time import monotonic
from typing import Any

from core.types.request import DraftTally
from core.types.timeline import Timeline
from router.routing.candidates import CandidateReplica, Option

_MAX_REQUESTS = 1000
_MAX_OPTIONS = 8  # best options kept of each decision
_MAX_LISTED_OPTIONS = 2  # options per request in `last`


@dataclass(frozen=True)
class _Attempt:
    options: Sequence[Option]
    views: Sequence[CandidateReplica]

    def best(self, number: int) -> list[dict[str, Any]]:
        """Return the best options. `is_learnt`: the replicas of an option have measured their own steps."""
        unlearnt = {view.replica for view in self.views if not view.is_learnt}
        return [
            asdict(option)
            | {"cost_s": option.cost_s, "is_learnt": unlearnt.isdisjoint({option.prefill, option.decode})}
            for option in self.options[:number]
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "options": self.best(_MAX_OPTIONS),
            "replicas": {view.replica: asdict(view) for view in self.views},
        }


@dataclass
class _Record:
    """Attempts and timeline of one request."""

    attempts: list[_Attempt] = field(default_factory=list)
    life: Timeline | None = None
    tenant: str = ""
    drafts: DraftTally | None = None

    def as_list(self) -> list[dict[str, Any]]:
        """Return one entry per attempt. The drafts of all attempts together are in the last entry."""
        attempts = [attempt.as_dict() for attempt in self.attempts]
        if self.drafts and self.drafts.steps:
            attempts[-1]["drafts"] = asdict(self.drafts)
        return attempts


class Decisions:
    """Log of the last 1,000 requests: options of each attempt, and timelines. Lives on the router's event loop."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def add(self, request_id: str, options: Sequence[Option], views: Sequence[CandidateReplica]) -> None:
        """Add an attempt: its options, the chosen one first, and the replicas as they were known then."""
        best = options[:_MAX_OPTIONS]
        named = {name for option in best for name in (option.prefill, option.decode, option.fetch_from)}
        attempt = _Attempt(best, [view for view in views if view.replica in named])
        self._record(request_id).attempts.append(attempt)

    def live(self, request_id: str, life: Timeline, *, tenant: str = "", drafts: DraftTally | None = None) -> None:
        """Register a new request. The request writes `life` and `drafts` while it runs."""
        record = self._record(request_id)
        record.life, record.tenant, record.drafts = life, tenant, drafts

    def explain(self, request_id: str) -> dict[str, list[dict[str, Any]]]:
        """Return the attempts of each request with this id, as plain values; empty if the id is unknown or too old.

        Each attempt has its `options` (costs in seconds, the chosen one first) and the `replicas` that they name, as
        they were known then. If a replica drafts, the last attempt also has `drafts` (see DraftTally).
        A client's id may stand for several requests, one per prompt, with different suffixes.
        """
        return {id: record.as_list() for id, record in self._of(request_id) if record.attempts}

    def lives(self, request_id: str) -> dict[str, dict[str, Any]]:
        """Return the timeline of each request with this id (see Timeline.as_dict); empty if unknown or too old."""
        return {id: record.life.as_dict() for id, record in self._of(request_id) if record.life}

    def last(self, number: int) -> list[dict[str, Any]]:
        """Return the last requests as plain values, newest first: best options, outcome and times.

        Ids and tenants come from clients unchecked.
        """
        rows = []
        for id, record in islice(reversed(self._records.items()), number):
            rows.append(
                {
                    "request": id,
                    "tenant": record.tenant,
                    "age_s": monotonic() - record.life.began if record.life else 0.0,
                    "attempts": len(record.attempts),
                    "options": record.attempts[-1].best(_MAX_LISTED_OPTIONS) if record.attempts else [],
                    "outcome": (record.life.outcome or "running") if record.life else "",
                    "seconds": record.life.ended - record.life.began if record.life and record.life.ended else None,
                    "first_token_s": record.life.first_s if record.life else 0.0,
                }
            )
        return rows

    def _of(self, request_id: str) -> list[tuple[str, _Record]]:
        of_request = re.compile(re.escape(request_id) + r"(-[0-9a-f]{8})?")
        return [(id, record) for id, record in self._records.items() if of_request.fullmatch(id)]

    def _record(self, request_id: str) -> _Record:
        record = self._records.get(request_id)
        if record is None:
            record = self._records[request_id] = _Record()
            if len(self._records) > _MAX_REQUESTS:
                self._records.popitem(last=False)
        return record
