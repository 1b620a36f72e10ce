"""The revisions of a deployment that serve side by side while it is updated, as its controller tells its routers, and
what routers tell the controller of them. Plain values.

While there is one revision alone, a router need not know of any.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from core.types.json_records import known_fields


@dataclass(frozen=True, kw_only=True)
class Revision:
    """One of those that serve."""

    number: int
    share: float  # of the requests
    takes_more: bool  # also those of another revision that has no room for them
    tokens: str  # equal of revisions that give the same tokens
    kind: str  # equal of revisions between which running answers move
    replicas: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class RevisionTable:
    """Those of one moment. A later table has a greater version."""

    version: int = 0
    revisions: tuple[Revision, ...] = ()

    def to_json(self) -> str:
        tree = asdict(self)
        tree["revisions"] = [asdict(one) | {"replicas": sorted(one.replicas)} for one in self.revisions]
        return json.dumps(tree)

    @classmethod
    def from_json(cls, text: str | bytes) -> RevisionTable:
        """What a newer version says beyond this is left out. Raises ValueError, KeyError or TypeError."""
        tree: dict[str, Any] = json.loads(text)
        revisions = [known_fields(Revision, one) for one in tree["revisions"]]
        return cls(
            version=tree["version"],
            revisions=tuple(Revision(**{**one, "replicas": frozenset(one["replicas"])}) for one in revisions),
        )


@dataclass(kw_only=True)
class RevisionCounts:
    """What has become of requests on one revision, since it was first heard of."""

    attempts: int = 0
    failed: int = 0  # attempts that the revision has failed, also where another one went on
    answered: int = 0  # requests that came to their end here
    ttft_s: float = 0.0  # their sum over the answered requests
    itl_s: float = 0.0  # likewise, of each answer's mean

    def plus(self, other: RevisionCounts) -> RevisionCounts:
        mine, others = asdict(self), asdict(other)
        return RevisionCounts(**{name: count + others[name] for name, count in mine.items()})


def counts_to_json(counts: Mapping[int, RevisionCounts]) -> str:
    """By revision."""
    return json.dumps({str(number): asdict(one) for number, one in counts.items()})


def counts_from_json(text: str | bytes) -> dict[int, RevisionCounts]:
    """Raises ValueError or TypeError."""
    tree = json.loads(text)
    if not isinstance(tree, dict):
        raise ValueError("not an object")
    return {int(number): RevisionCounts(**known_fields(RevisionCounts, one)) for number, one in tree.items()}
