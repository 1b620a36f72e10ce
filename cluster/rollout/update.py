r"""An update under way, as the controller keeps it: from which spec to which, and how far it has come. Plain values.

        CANARY  ->  ROLLING  ->  done: the new spec is the deployment's
           \           /
            RETURNING      ->  done: the old one still is

What each phase still has to do is told by the replicas that live (update_plan): so a controller that comes back goes
on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from core.spec.loader import parse_spec
from core.spec.schema import Spec
from core.types.errors import SpecError
from core.types.json_records import known_fields
from core.types.request import Role


class Phase(StrEnum):
    CANARY = "canary"  # the new revision has a share of the requests, and the old one its replicas
    ROLLING = "rolling"  # the new one takes the old one's place
    RETURNING = "returning"  # the old one takes its place back


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """How an operator wants an update carried out."""

    canary: float | None = None  # the share of requests that the new revision has at first; None: what it has room for
    canary_s: float = 60.0  # for so long
    max_error_increase: float = 0.1  # of the new revision's error rate over the old one's
    max_latency_factor: float | None = None  # of its mean TTFT and ITL to the old one's; None: not compared
    restarts_all: bool = False  # also replicas whose part of the spec is as it was: their code is another
    waits_for_nodes: bool = False

    def __post_init__(self) -> None:
        """Raises SpecError."""
        if self.canary is not None and not 0 < self.canary < 1:
            raise SpecError(f"--canary {self.canary:g}: a share of the requests, between 0 and 1")
        limits = {
            "--canary-s": self.canary_s,
            "--max-error-increase": self.max_error_increase,
            "--max-latency-factor": self.max_latency_factor,
        }
        for option, limit in limits.items():
            if limit is not None and not limit >= 0:  # NaN would compare as false forever
                raise SpecError(f"{option} {limit:g}: must be a number from 0 on")


@dataclass(frozen=True, kw_only=True)
class Update:
    """What becomes of one deployment."""

    revision: int  # that it leads to
    spec: Spec  # of that
    roles: frozenset[Role]  # whose replicas are replaced
    options: UpdateOptions = UpdateOptions()
    phase: Phase = Phase.ROLLING
    reason: str = ""  # why it returns

    def returning(self, reason: str) -> Update:
        return replace(self, phase=Phase.RETURNING, reason=reason)

    def to_tree(self) -> dict[str, Any]:
        return {
            "revision": self.revision,
            "spec": self.spec.model_dump(mode="json"),
            "roles": sorted(self.roles),
            "options": asdict(self.options),
            "phase": self.phase,
            "reason": self.reason,
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Update:
        return cls(
            revision=tree["revision"],
            spec=parse_spec(tree["spec"], origin="the stored update"),
            roles=frozenset(Role(role) for role in tree["roles"]),
            options=UpdateOptions(**known_fields(UpdateOptions, tree["options"])),
            phase=Phase(tree["phase"]),
            reason=tree["reason"],
        )
