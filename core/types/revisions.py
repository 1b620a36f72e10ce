"""Revisions that serve side by side during an update, and the request counts that routers report per revision.

A deployment with a single revision needs no table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from core.types.json_records import known_fields


@dataclass(frozen=True, kw_only=True)
class Revision:
    """Serving revision of a deployment."""

    number: int
    share: float  # fraction of the requests
    takes_more: bool  # also takes requests that another revision has no room for
    tokens: str  # equal for revisions that generate the same tokens
    kind: str  # equal for revisions between which running answers can migrate
    replicas: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class RevisionTable:
    """Serving revisions at one moment. A later table has a greater version."""

    version: int = 0
    revisions: tuple[Revision, ...] = ()

    def to_json(self) -> str:
        tree = asdict(self)
        tree["revisions"] = [asdict(one) | {"replicas": sorted(one.replicas)} for one in self.revisions]
        return json.dumps(tree)

    @classmethod
    def from_json(cls, text: str | bytes) -> RevisionTable:
        """Parse a table. Ignores unknown fields (of newer versions). Raises ValueError, KeyError or TypeError."""
        tree: dict[str, Any] = json.loads(text)
        revisions = [known_fields(Revision, one) for one in tree["revisions"]]
        return cls(
            version=tree["version"],
            revisions=tuple(Revision(**{**one, "replicas": frozenset(one["replicas"])}) for one in revisions),
        )


@dataclass(kw_only=True)
class RevisionCounts:
    """Counts of the requests on one revision since the router first saw it."""

    attempts: int = 0
    failed: int = 0  # failed attempts, including those that another revision continued
    answered: int = 0  # requests that finished on this revision
    ttft_s: float = 0.0  # sum over the answered requests
    itl_s: float = 0.0  # sum of the mean ITL of each answered request

    def add_answer(self, ttft_s: float, itl_s: float) -> None:
        self.answered += 1
        self.ttft_s += ttft_s
        self.itl_s += itl_s

    def plus(self, other: RevisionCounts) -> RevisionCounts:
        mine, others = asdict(self), asdict(other)
        return RevisionCounts(**{name: count + others[name] for name, count in mine.items()})


def counts_to_json(counts: Mapping[int, RevisionCounts]) -> str:
    """Serialize counts by revision."""
    return json.dumps({str(number): asdict(one) for number, one in counts.items()})


def counts_from_json(text: str | bytes) -> dict[int, RevisionCounts]:
    """Parse counts by revision. Raises ValueError or TypeError."""
    tree = json.loads(text)
    if not isinstance(tree, dict):
        raise ValueError("not an object")
    return {int(number): RevisionCounts(**known_fields(RevisionCounts, one)) for number, one in tree.items()}
