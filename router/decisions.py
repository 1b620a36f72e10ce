"""Why requests went where they went: the last choices of a router, with their numbers."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from router.policy import Option

_MAX_REQUESTS = 1000
_MAX_OPTIONS = 8  # of each choice, the best ones


class Decisions:
    """The options of the last requests, attempt by attempt. Lives on the router's event loop."""

    def __init__(self) -> None:
        self._attempts: OrderedDict[str, list[Sequence[Option]]] = OrderedDict()

    def add(self, request_id: str, options: Sequence[Option]) -> None:
        """`options` of one more attempt, the one taken first."""
        self._attempts.setdefault(request_id, []).append(options[:_MAX_OPTIONS])
        if len(self._attempts) > _MAX_REQUESTS:
            self._attempts.popitem(last=False)

    def explain(self, request_id: str) -> dict[str, list[list[dict[str, Any]]]]:
        """For each request of this id: per attempt its options, the one taken first, as plain values in seconds.

        A client's id may stand for several requests (one per prompt), which have a suffix each. Empty: not known (any
        more).
        """
        of_request = re.compile(re.escape(request_id) + r"(-[0-9a-f]{8})?")
        return {
            id: [[asdict(option) | {"cost_s": option.cost_s} for option in options] for options in attempts]
            for id, attempts in self._attempts.items()
            if of_request.fullmatch(id)
        }
