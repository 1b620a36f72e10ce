"""Rules for a role switch: settings that are fixed at load must be equal in both pools."""

from __future__ import annotations

from core.spec.schema import DecodePoolSpec, PoolSpec, Spec
from core.types.request import Role

# Settings fixed at load: memory, sharding of the weights, and Ray's placement. The rest of a pool (max_running,
# max_batch_tokens, max_waiting, speculation) is read again when the role changes.
_FIXED = (
    "tensor_parallel",
    "resources",
    "labels",
    "kv_memory_gib",
    "kv_host_gib",
    "kv_disk_gib",
    "kv_disk_path",
)
_OF_DECODE = ("expert_parallel", "redundant_experts")  # sharding that only decode replicas have
_OF_ALL = ("model", "kv", "engine")  # sections


def other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


def hindrance(spec: Spec) -> str:
    """Return why replicas of this deployment cannot switch roles, with the fix; empty if they can."""
    ours, theirs = _fixed(spec.prefill), _fixed(spec.decode)
    if names := [name for name in ours if ours[name] != theirs[name]]:
        values = ", ".join(f"{name} (prefill {_shown(ours[name])}, decode {_shown(theirs[name])})" for name in names)
        return (
            f"the pools differ in {values}, which is fixed when a replica loads; make it equal in the spec and "
            "run `cluster update`"
        )
    if spec.speculation.model and spec.speculation.method in ("draft", "auto") and spec.decode.resources.gpus:
        return "speculation.model: on a GPU a decode replica reserves memory for it when it loads; leave it out"
    return ""


def largest_step(spec: Spec, role: Role) -> tuple[int, int]:
    """Return (tokens, sequences) of the largest step of a rank, over all roles that it can have."""
    pools: list[PoolSpec] = [spec.pool(each) for each in Role if each is role or not hindrance(spec)]
    return max(pool.max_batch_tokens for pool in pools), max(pool.max_running for pool in pools)


def unlike(loaded: Spec, role: Role, wanted: Spec) -> list[str]:
    """Return the settings that keep a replica, loaded as `role` with spec `loaded`, from taking the other role in
    `wanted`."""
    has, needs = _fixed(loaded.pool(role)), _fixed(wanted.pool(other(role)))
    sections = [name for name in _OF_ALL if getattr(loaded, name) != getattr(wanted, name)]
    if _drafts_by(loaded) != _drafts_by(wanted):
        sections.append("speculation")
    return sections + [name for name in has if has[name] != needs[name]]


def _drafts_by(spec: Spec) -> tuple[object, ...]:
    """Return the speculation settings that are fixed at load: draft heads, which `auto` may find in `model`."""
    drafts = spec.speculation
    is_fixed = drafts.heads or (drafts.model and drafts.method != "draft")
    return (drafts.method, drafts.model) if is_fixed else ()


def _fixed(pool: PoolSpec) -> dict[str, object]:
    experts = {name: DecodePoolSpec.model_fields[name].default for name in _OF_DECODE}
    own = {name: getattr(pool, name) for name in _OF_DECODE if hasattr(pool, name)}
    return {name: getattr(pool, name) for name in _FIXED} | experts | own


def _shown(value: object) -> str:
    """Format a value as in the spec."""
    return str(getattr(value, "model_dump", lambda **more: value)(exclude_defaults=True))
