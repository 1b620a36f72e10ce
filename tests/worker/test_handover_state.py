"""Checks of the state that a rank hands over on a role switch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.spec.loader import parse_spec
from core.spec.schema import Spec
from core.types.errors import SpecError
from core.types.request import Role
from core.types.role_switch import largest_step
from worker.rank_setup import HandoverState


def handover_state(spec: Spec, role: Role, *, device: str = "cpu") -> HandoverState:
    runner: Any = SimpleNamespace(device=torch.device(device))
    return HandoverState(spec=spec, role=role, runner=runner, tiers=None, leader=None)


def test_different_load_parameters_are_rejected_by_name() -> None:
    old, new = parse_spec({"decode": {"kv_memory_gib": 2.0}}), parse_spec({})
    handover_state(new, Role.DECODE).check(new, Role.PREFILL)
    with pytest.raises(SpecError, match="loaded kv_memory_gib differ from those of a prefill replica"):
        handover_state(old, Role.DECODE).check(new, Role.PREFILL)


def test_gpu_memory_must_cover_the_largest_step_of_both_roles() -> None:
    old = parse_spec({"prefill": {"max_batch_tokens": 1024}, "decode": {"max_batch_tokens": 256, "max_running": 100}})
    assert largest_step(old, Role.DECODE) == largest_step(old, Role.PREFILL) == (1024, 100)
    apart = parse_spec({"decode": {"max_batch_tokens": 256, "labels": {"a": "b"}}})
    assert largest_step(apart, Role.DECODE) == (256, 64), "no switch is possible"
    handover_state(old, Role.DECODE, device="cuda").check(old, Role.PREFILL)
    larger = parse_spec({"prefill": {"max_batch_tokens": 2048}})
    handover_state(old, Role.DECODE).check(larger, Role.PREFILL)
    with pytest.raises(SpecError, match="memory for steps of 1024 tokens and 100 sequences, needs 2048 and 64"):
        handover_state(old, Role.DECODE, device="cuda").check(larger, Role.PREFILL)
