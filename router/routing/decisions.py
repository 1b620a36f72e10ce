"""Why requests went where they went: the last decisions of a router, with their numbers."""

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
from router.routing.policy import CandidateReplica, Option

_MAX_REQUESTS = 1000
_MAX_OPTIONS = 8  # of each decision, the best ones
_MAX_TOLD = 2  # of these, of each of the last decisions


@dataclass(frozen=True)
class _Attempt:
    options: Sequence[Option]
    views: Sequence[CandidateReplica]

    def as_dict(self) -> dict[str, Any]:
        return {
            "options": [asdict(option) | {"cost_s": option.cost_s} for option in self.options],
            "replicas": {view.replica: asdict(view) for view in self.views},
        }


@dataclass
class _Record:
    """What is remembered of one request."""

    attempts: list[_Attempt] = field(default_factory=list)
    life: Timeline | None = None
    tenant: str = ""
    drafts: DraftTally | None = None

    def told(self) -> list[dict[str, Any]]:
        """Attempt by attempt. What was drafted is known of all together, and stands with the last."""
        attempts = [attempt.as_dict() for attempt in self.attempts]
        if self.drafts and self.drafts.steps:
            attempts[-1]["drafts"] = asdict(self.drafts)
        return attempts


class Decisions:
    """The options of the last requests, attempt by attempt, and where their time went. Lives on the router's event
    loop."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def add(self, request_id: str, options: Sequence[Option], views: Sequence[CandidateReplica]) -> None:
        """`options` of one more attempt, the one taken first, and what was known of the replicas then."""
        best = options[:_MAX_OPTIONS]
        named = {name for option in best for name in (option.prefill, option.decode, option.fetch_from)}
        attempt = _Attempt(best, [view for view in views if view.replica in named])
        self._record(request_id).attempts.append(attempt)

    def live(self, request_id: str, life: Timeline, *, tenant: str = "", drafts: DraftTally | None = None) -> None:
        """A request has come; `life` and `drafts` are written while it runs."""
        record = self._record(request_id)
        record.life, record.tenant, record.drafts = life, tenant, drafts

    def explain(self, request_id: str) -> dict[str, list[dict[str, Any]]]:
        """For each request of this id: per attempt its `options`, the one taken first, as plain values in seconds, and
        the `replicas` that they name as they were known: what they held, what was before them, and their rates; and
        with the last one, where a replica drafts, its `drafts` (see DraftTally).

        A client's id may stand for several requests (one per prompt), which have a suffix each. Empty: not known (any
        more).
        """
        return {id: record.told() for id, record in self._of(request_id) if record.attempts}

    def lives(self, request_id: str) -> dict[str, dict[str, Any]]:
        """For each request of this id where its time went, as Life.as_dict has it. Empty: not known (any more)."""
        return {id: record.life.as_dict() for id, record in self._of(request_id) if record.life}

    def last(self, number: int) -> list[dict[str, Any]]:
        """The last requests, the latest first: what was decided first, and why, and what has become of them. Plain
        values; ids and tenants are clients' words."""
        told = []
        for id, record in islice(reversed(self._records.items()), number):
            options = record.attempts[-1].options if record.attempts else ()
            told.append(
                {
                    "request": id,
                    "tenant": record.tenant,
                    "age_s": monotonic() - record.life.began if record.life else 0.0,
                    "attempts": len(record.attempts),
                    "options": [asdict(option) | {"cost_s": option.cost_s} for option in options[:_MAX_TOLD]],
                    "outcome": (record.life.outcome or "running") if record.life else "",
                    "seconds": record.life.ended - record.life.began if record.life and record.life.ended else None,
                    "first_token_s": record.life.first_s if record.life else 0.0,
                }
            )
        return told

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
