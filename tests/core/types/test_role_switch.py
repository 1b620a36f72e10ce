"""Conditions under which replicas can switch roles."""

from __future__ import annotations

from typing import Any

import pytest

from core.spec.loader import parse_spec
from core.spec.schema import PoolSpec
from core.types.request import Role
from core.types.role_switch import hindrance, unlike

_ANY: dict[str, Any] = {  # pool fields that may differ, with a value other than the default
    "replicas": 3,
    "max_running": 7,
    "max_batch_tokens": 300,
    "max_waiting": 5,
}
_NONE: dict[str, Any] = {
    "tensor_parallel": 2,
    "resources": {"cpus": 2},
    "labels": {"pool": "prefill"},
    "kv_memory_gib": 2.0,
    "kv_host_gib": 1.0,
    "kv_disk_gib": 1.0,
    "kv_disk_path": "/somewhere",
}


def test_settings_read_at_a_switch_may_differ() -> None:
    assert not hindrance(parse_spec({}))
    assert not hindrance(parse_spec({"prefill": _ANY}))
    assert _ANY.keys() | _NONE.keys() == PoolSpec.model_fields.keys(), "classify the new pool field"


@pytest.mark.parametrize("field", _NONE)
def test_settings_fixed_at_load_prevent_a_switch_and_are_named(field: str) -> None:
    for pool in Role:
        reason = hindrance(parse_spec({pool.value: {field: _NONE[field]}}))
        assert reason.startswith(f"the pools differ in {field} (prefill ") and "make it equal in the spec" in reason


def test_expert_parallel_prevents_a_switch() -> None:
    spec = parse_spec({"decode": {"expert_parallel": True, "redundant_experts": 2}})
    reason = hindrance(spec)
    assert "expert_parallel (prefill False, decode True), redundant_experts (prefill 0, decode 2)" in reason


def test_changed_settings_are_compared_with_those_at_load() -> None:
    """Later changes of the spec do not affect the replica."""
    old, new = parse_spec({"decode": {"kv_memory_gib": 2.0}}), parse_spec({"decode": {"max_running": 3}})
    assert unlike(new, Role.DECODE, new) == []
    assert unlike(old, Role.DECODE, new) == ["kv_memory_gib"]
    assert unlike(old, Role.PREFILL, new) == [], "the prefill pool of the old spec equals both pools of the new one"
    assert unlike(parse_spec({"engine": {"cuda_graphs": "off"}}), Role.PREFILL, new) == ["engine"]


def test_draft_model_prevents_a_switch_only_on_a_gpu() -> None:
    draft = {"speculation": {"method": "draft", "model": "m"}}
    assert not hindrance(parse_spec(draft)) and not unlike(parse_spec({}), Role.PREFILL, parse_spec(draft))
    gpus = {pool.value: {"resources": {"gpus": 1}} for pool in Role}
    assert "speculation.model" in hindrance(parse_spec(draft | gpus)) and not hindrance(parse_spec(gpus))
    heads = {"speculation": {"method": "medusa", "model": "m"}}
    assert unlike(parse_spec({}), Role.PREFILL, parse_spec(heads)) == ["speculation"]
    assert unlike(parse_spec({}), Role.PREFILL, parse_spec({"speculation": {"method": "mtp"}})) == ["speculation"]
