r"""State of a running update, as the controller stores it. Plain values.

        CANARY  ->  ROLLING  ->  done: the new spec becomes the deployment's
           \           /
            RETURNING      ->  done: the old spec stays

The remaining work of a phase follows from the running replicas (update_plan), so a restarted controller can continue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import msgspec

from core.spec.loader import parse_spec
from core.spec.schema import Spec
from core.types.errors import SpecError
from core.types.request import Role


class Phase(StrEnum):
    # The new revision has a share of the requests; the old one keeps its replicas.
    CANARY = "canary"
    # The new revision replaces the old one.
    ROLLING = "rolling"
    # Rollback: the old revision replaces the new one.
    RETURNING = "returning"


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    # Share of requests for the new revision at first; None: as many as it has room for.
    canary: float | None = None
    # Duration of the canary phase.
    canary_s: float = 60.0
    # Limit of the new revision's error rate above the old one's.
    max_error_increase: float = 0.1
    # Limit of its mean TTFT and ITL relative to the old one's; None: not compared.
    max_latency_factor: float | None = None
    # Also restart replicas whose settings did not change, for new code.
    restarts_all: bool = False
    waits_for_nodes: bool = False

    def __post_init__(self) -> None:
        """Raise SpecError for values out of range."""
        if self.canary is not None and not 0 < self.canary < 1:
            raise SpecError(f"--canary {self.canary:g}: must be a share of the requests between 0 and 1")
        limits = {
            "--canary-s": self.canary_s,
            "--max-error-increase": self.max_error_increase,
            "--max-latency-factor": self.max_latency_factor,
        }
        for option, limit in limits.items():
            # NaN fails this test, too.
            if limit is not None and not limit >= 0:
                raise SpecError(f"{option} {limit:g}: must be a number >= 0")


@dataclass(frozen=True, kw_only=True)
class Update:
    revision: int  # target revision
    spec: Spec  # spec of the target revision
    roles: frozenset[Role]  # roles whose replicas are replaced
    options: UpdateOptions = UpdateOptions()
    phase: Phase = Phase.ROLLING
    # Reason of the rollback.
    reason: str = ""

    def to_tree(self) -> dict[str, Any]:
        return asdict(self) | {"spec": self.spec.model_dump(mode="json"), "roles": sorted(self.roles)}

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Update:
        return msgspec.convert(tree, cls, dec_hook=lambda _, spec: parse_spec(spec, origin="the stored update"))
