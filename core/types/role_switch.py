"""Whether a replica can become one of the other pool as it is: what is fixed when it loads must be equal in both."""

from __future__ import annotations

from core.spec.schema import DecodePoolSpec, PoolSpec, Spec
from core.types.request import Role

# What memory a rank has taken, how its weights are cut, and the place that Ray has set aside for it. The rest of a
# pool (max_running, max_batch_tokens, max_waiting, speculation) is read anew when the role changes.
_FIXED = (
    "tensor_parallel",
    "resources",
    "labels",
    "kv_memory_gib",
    "kv_host_gib",
    "kv_disk_gib",
    "kv_disk_path",
)
_OF_DECODE = ("expert_parallel", "redundant_experts")  # how a decode replica's weights are cut, and no other's
_OF_ALL = ("model", "kv", "engine")  # sections


def other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


def hindrance(spec: Spec) -> str:
    """What keeps replicas of this deployment from changing their role, and what to do about it; empty: nothing does."""
    ours, theirs = _fixed(spec.prefill), _fixed(spec.decode)
    if names := [name for name in ours if ours[name] != theirs[name]]:
        values = ", ".join(f"{name} (prefill {_shown(ours[name])}, decode {_shown(theirs[name])})" for name in names)
        return (
            f"the pools differ in {values}, which is fixed when a replica loads; make it equal in the spec, and "
            "`cluster update` to that"
        )
    if spec.speculation.model and spec.speculation.method in ("draft", "auto") and spec.decode.resources.gpus:
        return "speculation.model: on a GPU a decode replica sets memory aside for it when it loads; leave it out"
    return ""


def largest_step(spec: Spec, role: Role) -> tuple[int, int]:
    """Tokens and sequences of the largest step of a rank, in each role that it can have."""
    pools: list[PoolSpec] = [spec.pool(each) for each in Role if each is role or not hindrance(spec)]
    return max(pool.max_batch_tokens for pool in pools), max(pool.max_running for pool in pools)


def unlike(loaded: Spec, role: Role, wanted: Spec) -> list[str]:
    """What a replica that was loaded as one of `role`, with the spec of that time, has other than one of the other role
    would have that is loaded now with `wanted`."""
    has, needs = _fixed(loaded.pool(role)), _fixed(wanted.pool(other(role)))
    sections = [name for name in _OF_ALL if getattr(loaded, name) != getattr(wanted, name)]
    if _drafts_by(loaded) != _drafts_by(wanted):  # else it is read anew
        sections.append("speculation")
    return sections + [name for name in has if has[name] != needs[name]]


def _drafts_by(spec: Spec) -> tuple[object, ...]:
    """What of it may have been loaded with the model: heads, which `auto` finds by itself."""
    drafts = spec.speculation
    return (drafts.method, drafts.model) if drafts.heads or (drafts.model and drafts.method != "draft") else ()


def _fixed(pool: PoolSpec) -> dict[str, object]:
    experts = {name: DecodePoolSpec.model_fields[name].default for name in _OF_DECODE}
    own = {name: getattr(pool, name) for name in _OF_DECODE if hasattr(pool, name)}
    return {name: getattr(pool, name) for name in _FIXED} | experts | own


def _shown(value: object) -> str:
    """As the operator wrote it."""
    return str(getattr(value, "model_dump", lambda **more: value)(exclude_defaults=True))
