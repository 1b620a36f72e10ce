"""State handed over on a role switch, from a rank to its successor in the same process."""

from __future__ import annotations

from dataclasses import dataclass

from core.spec.schema import Spec
from core.types.errors import SpecError
from core.types.request import Role
from core.types.role_switch import largest_step, unlike
from engine.kv.block_manager import BlockManager
from engine.runner.runner import ModelRunner
from engine.scheduler.prompts import Prompt
from engine.tiers.rank_tiers import RankTiers
from engine.tiers.tiers import Tiers
from worker.grammars import Grammars


@dataclass(frozen=True, kw_only=True)
class LeaderHandoverState:
    """State of rank 0. Every block is free or cached."""

    blocks: BlockManager
    tiers: Tiers[Prompt]
    grammars: Grammars


@dataclass(frozen=True, kw_only=True)
class HandoverState:
    """State of an idle rank: nothing computes, and no link accesses its blocks."""

    spec: Spec  # as loaded
    role: Role  # as loaded
    runner: ModelRunner
    tiers: RankTiers | None
    leader: LeaderHandoverState | None

    def check(self, spec: Spec, role: Role) -> None:
        """Raise SpecError if this state does not fit a rank with the given spec and role."""
        if names := unlike(self.spec, self.role, spec):
            raise SpecError(f"loaded {', '.join(names)} differ from those of a {role} replica")
        most, needed = largest_step(self.spec, self.role), largest_step(spec, role)
        if self.runner.device.type == "cuda" and any(need > had for need, had in zip(needed, most, strict=True)):
            raise SpecError(
                f"memory for steps of {most[0]} tokens and {most[1]} sequences, needs {needed[0]} and {needed[1]}"
            )
