"""Why requests went where they went: the last decisions of a router, with their numbers."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from router.routing.policy import CandidateReplica, Option

_MAX_REQUESTS = 1000
_MAX_OPTIONS = 8  # of each decision, the best ones


@dataclass(frozen=True)
class _Attempt:
    options: Sequence[Option]
    views: Sequence[CandidateReplica]

    def as_dict(self) -> dict[str, Any]:
        return {
            "options": [asdict(option) | {"cost_s": option.cost_s} for option in self.options],
            "replicas": {view.replica: asdict(view) for view in self.views},
        }


class Decisions:
    """The options of the last requests, attempt by attempt. Lives on the router's event loop."""

    def __init__(self) -> None:
        self._attempts: OrderedDict[str, list[_Attempt]] = OrderedDict()

    def add(self, request_id: str, options: Sequence[Option], views: Sequence[CandidateReplica]) -> None:
        """`options` of one more attempt, the one taken first, and what was known of the replicas then."""
        best = options[:_MAX_OPTIONS]
        named = {name for option in best for name in (option.prefill, option.decode, option.pull_from)}
        attempt = _Attempt(best, [view for view in views if view.replica in named])
        self._attempts.setdefault(request_id, []).append(attempt)
        if len(self._attempts) > _MAX_REQUESTS:
            self._attempts.popitem(last=False)

    def explain(self, request_id: str) -> dict[str, list[dict[str, Any]]]:
        """For each request of this id: per attempt its `options`, the one taken first, as plain values in seconds, and
        the `replicas` that they name as they were known: what they held, what was before them, and their rates.

        A client's id may stand for several requests (one per prompt), which have a suffix each. Empty: not known (any
        more).
        """
        of_request = re.compile(re.escape(request_id) + r"(-[0-9a-f]{8})?")
        return {
            id: [attempt.as_dict() for attempt in attempts]
            for id, attempts in self._attempts.items()
            if of_request.fullmatch(id)
        }
