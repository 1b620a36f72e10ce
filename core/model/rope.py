"""Rotary settings of a config.json, in transformers' forms: `rope_parameters` and the older `rope_scaling`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from core.model.settings import Settings
from core.model.shape import RopeConfig
from core.types.errors import SpecError

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "factors")
# Names that older files use.
_OLDER = {"su": "longrope"}
_REALS = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
_SCALES = ("mscale", "mscale_all_dim")


def read_rope(
    settings: Settings,
    *,
    head_dim: int,
    kind: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    is_interleaved: bool = False,
) -> RopeConfig:
    """Read the rotation of one kind of layer. Raises SpecError.

    kind: key of `rope_parameters` if they are given per kind of layer. parameters: settings to use instead.
    """
    given = Settings(_parameters(settings, kind) if parameters is None else parameters)
    name = given.get("rope_type") or given.get("type") or "default"
    name = _OLDER.get(name, name)
    if name not in _KINDS:
        raise SpecError(f"rope type {name} is not supported; supported: {', '.join(_KINDS)}")
    max_position = settings.count("max_position_embeddings")
    original = settings.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    original = Settings({"original_max_position_embeddings": original or max_position}).real(
        "original_max_position_embeddings"
    )
    share = given.real("partial_rotary_factor", 1.0)
    if share > 1:
        raise SpecError(f"partial_rotary_factor is {share}, and must be at most 1")
    rotated = int(head_dim * share)
    if rotated % 2:
        raise SpecError(f"partial_rotary_factor {share} of head_dim {head_dim} is {rotated}, and must be even")
    return RopeConfig(
        dim=head_dim if name == "proportional" else rotated,
        num_rotated=rotated if name == "proportional" else None,
        theta=given.real("rope_theta", 10000.0),
        max_position=max_position,
        is_interleaved=is_interleaved,
        kind=name,
        original_max_position=original,
        truncate=given.switch("truncate", True),
        **_scaling(given, name, max_position / original),
    )


def context_of(rope: RopeConfig) -> int:
    """Return the context length. max_position_embeddings excludes linear and dynamic scaling, and may include yarn.

    longrope: up to the original length. Longer contexts need other divisors for all positions, see `lengthen`.
    """
    match rope.kind:
        case "linear" | "dynamic":
            return math.floor(rope.max_position * rope.factor)
        case "yarn":
            return max(rope.max_position, math.floor(rope.original_max_position * rope.factor))
    return rope.max_position


def _parameters(settings: Settings, kind: str | None) -> dict[str, Any]:
    """Return the rotary settings in transformers 5's form: theta and scaling together."""
    found = dict(settings.object("rope_parameters") or settings.object("rope_scaling"))
    if nested := [name for name, value in found.items() if isinstance(value, dict)]:
        if kind is None or kind not in nested:
            raise SpecError(f"rope_parameters for {', '.join(nested)} do not fit this architecture")
        found = dict(found[kind])
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in settings and found.get(key) is None:
            found[key] = settings.get(key)
    return found


def _scaling(given: Settings, kind: str, default_factor: float) -> dict[str, Any]:
    numbers: dict[str, Any] = {key: given.real(key) for key in _REALS if key in given}
    numbers |= {key: float(given.get(key)) for key in _SCALES if key in given}
    for key in ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ():
        if key not in given:
            raise KeyError(f"rope_scaling.{key}")
    match kind:
        case "default" | "factors":
            numbers["factor"] = 1.0
        case "yarn" | "longrope":
            numbers["factor"] = given.real("factor", default_factor)
        case "proportional":
            numbers["factor"] = given.real("factor", 1.0)
        case _:
            if "factor" not in given:
                raise KeyError("rope_scaling.factor")
            numbers["factor"] = given.real("factor")
    if kind == "factors":
        numbers["factors"] = tuple(given.get("factors", ()))
    if kind == "longrope":
        numbers["factors"] = tuple(given.get("short_factor"))
        numbers["long_factors"] = tuple(given.get("long_factor"))
    return numbers
