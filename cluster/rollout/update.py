r"""An update under way, as the controller keeps it: from which spec to which, and how far it has come. Plain values.

        CANARY  ->  ROLLING  ->  done: the new spec is the deployment's
           \           /
            RETURNING      ->  done: the old one still is

What each phase still has to do is told by the replicas that live (update_plan): so a controller that comes back goes
on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from core.spec.loader import parse_spec
from core.spec.schema import Spec
from core.types.errors import SpecError
from core.types.json_records import known_fields
from core.types.request import Role
from core.types.revisions import Slo


class Phase(StrEnum):
    CANARY = "canary"  # the new revision has a share of the requests, and the old one its replicas
    ROLLING = "rolling"  # the new one takes the old one's place
    RETURNING = "returning"  # the old one takes its place back


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """How an operator wants an update carried out."""

    canary: float | None = None  # the share of requests that the new revision has at first; None: what it has room for
    canary_s: float = 60.0  # for so long
    slo: Slo = field(default_factory=Slo)
    restarts_all: bool = False  # also replicas whose part of the spec is as it was: their code is another
    waits_for_nodes: bool = False

    def __post_init__(self) -> None:
        """Raises SpecError."""
        if self.canary is not None and not 0 < self.canary < 1:
            raise SpecError(f"--canary {self.canary:g}: a share of the requests, between 0 and 1")
        limits = {"--canary-s": self.canary_s, "--slo-ttft-ms": self.slo.ttft_ms, "--slo-itl-ms": self.slo.itl_ms}
        for option, limit in limits.items():
            if limit is not None and not limit >= 0:  # not a number, too: that would never be over, or never be kept
                raise SpecError(f"{option} {limit:g}: a time, from 0 on")


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
        options = dict(known_fields(UpdateOptions, tree["options"]))
        options["slo"] = Slo(**known_fields(Slo, options.get("slo", {})))
        return cls(
            revision=tree["revision"],
            spec=parse_spec(tree["spec"], origin="the stored update"),
            roles=frozenset(Role(role) for role in tree["roles"]),
            options=UpdateOptions(**options),
            phase=Phase(tree["phase"]),
            reason=tree["reason"],
        )
