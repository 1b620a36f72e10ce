"""What a rank leaves to the one that its process becomes in another role: weights, blocks, what is known of them."""

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
    """Of rank 0. Every block is free or cached."""

    blocks: BlockManager
    tiers: Tiers[Prompt]
    grammars: Grammars


@dataclass(frozen=True, kw_only=True)
class HandoverState:
    """Nothing computes, and no link of the rank that was there before reads or writes a block."""

    spec: Spec  # with which it was loaded
    role: Role  # and as what
    runner: ModelRunner
    tiers: RankTiers | None
    leader: LeaderHandoverState | None

    def check(self, wanted: Spec, role: Role) -> None:
        """Raises SpecError where a rank that is loaded as `role` with this spec would be another."""
        if names := unlike(self.spec, self.role, wanted):
            raise SpecError(f"it was loaded with another {', '.join(names)} than a {role} replica has now")
        most, needed = largest_step(self.spec, self.role), largest_step(wanted, role)
        if self.runner.device.type == "cuda" and any(need > had for need, had in zip(needed, most, strict=True)):
            raise SpecError(
                f"it has memory for steps of {most[0]} tokens and {most[1]} sequences, not {needed[0]} and {needed[1]}"
            )
