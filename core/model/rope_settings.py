"""Rotary settings of a config.json, in transformers' forms: `rope_parameters` and the older `rope_scaling`.

RopeConfig (core/model/shape.py) holds the result; engine/attention/rotary.py has the formula of each kind.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from core.model.settings import MOST, Settings
from core.model.shape import RopeConfig
from core.types.errors import SpecError

_THETA = 10000.0  # where config.json has none
_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "factors")
# Names that older files use.
_OLDER = {"su": "longrope"}
_REALS = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
_SCALES = ("mscale", "mscale_all_dim")


def read_rope(
    settings: Settings,
    *,
    head_dim: int,
    rotated: int | None = None,
    can_be_partial: bool = False,
    parameters: Mapping[str, Any] | None = None,
    is_interleaved: bool = False,
) -> RopeConfig:
    """Read the rotation of one kind of layer. Raises SpecError.

    rotated: features of a head that are rotated; None: all, or if `can_be_partial` partial_rotary_factor of them.
    parameters: settings to use instead of those for all layers.
    """
    given = Settings(_parameters(settings) if parameters is None else parameters)
    key = "rope_type" if given.get("rope_type") else "type"
    name = given.choice(key, (*_KINDS, *_OLDER), "default")
    name = _OLDER.get(name, name)
    max_position = settings.count("max_position_embeddings")
    original = settings.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    original = Settings({"original_max_position_embeddings": original or max_position}).real(
        "original_max_position_embeddings"
    )
    share = given.real("partial_rotary_factor", 1.0)
    # Mistral 4's own share is that of its rotated features.
    if share != 1 and not (
        can_be_partial and share < 1 if rotated is None else math.isclose(share * head_dim, rotated)
    ):
        raise SpecError(f"partial_rotary_factor {share} is not supported for this architecture")
    rotated = rotated or int(head_dim * share)
    dim = head_dim if name == "proportional" else rotated
    if rotated < 2 or rotated % 2 or dim % 2:
        raise SpecError(
            f"partial_rotary_factor {share} of head_dim {head_dim} rotates {rotated} features, which must be an even "
            "number from 2"
        )
    rope = RopeConfig(
        dim=dim,
        num_rotated=rotated if name == "proportional" else None,
        theta=given.real("rope_theta", _THETA),
        max_position=max_position,
        is_interleaved=is_interleaved,
        kind=name,
        original_max_position=original,
        truncate=given.switch("truncate", True),
        **_scaling(given, name, max_position / original, rotated // 2),
    )
    _check(rope)
    return rope


def context_of(rope: RopeConfig) -> int:
    """Return the context length. max_position_embeddings excludes linear and dynamic scaling, and may include yarn.

    For longrope it is the original length; see ModelConfig.lengthened.
    """
    match rope.kind:
        case "linear" | "dynamic":
            return math.floor(rope.max_position * rope.factor)
        case "yarn":
            return max(rope.max_position, math.floor(rope.original_max_position * rope.factor))
        case "longrope":
            return int(rope.original_max_position)
    return rope.max_position


def _check(rope: RopeConfig) -> None:
    """Raise SpecError for parameters that make a formula of the rope type divide by 0, or the context overflow."""
    original = rope.original_max_position
    needs = {
        "dynamic": (rope.dim > 2, f"rotates {rope.dim} features, and must rotate at least 4"),
        "llama3": (
            rope.low_freq_factor <= rope.high_freq_factor,
            f"has low_freq_factor {rope.low_freq_factor}, and must have at most the high_freq_factor "
            f"{rope.high_freq_factor}",
        ),
        "yarn": (rope.theta > 1, f"has rope_theta {rope.theta}, and must have more than 1"),
        "longrope": (original >= 2, f"has original_max_position_embeddings {original}, and must have at least 2"),
    }
    is_met, complaint = needs.get(rope.kind, (True, ""))
    if not is_met:
        raise SpecError(f"rope type {rope.kind} {complaint}")
    if not 1 <= max(rope.max_position, original) * rope.factor <= MOST:
        raise SpecError(f"rope type {rope.kind} has factor {rope.factor}: the context must be from 1 to {MOST} tokens")


def _parameters(settings: Settings) -> dict[str, Any]:
    """Return the rotary settings in transformers 5's form: theta and scaling together.

    rope_scaling, which users add for longer contexts, replaces rope_parameters, as in transformers.
    """
    parameters = settings.object("rope_parameters")
    found = dict(settings.object("rope_scaling") or parameters)
    if nested := [name for name, value in found.items() if isinstance(value, dict)]:
        raise SpecError(f"rope_parameters per kind of layer ({', '.join(nested)}) do not fit this architecture")
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in settings and found.get(key) is None:
            found[key] = settings.get(key)
    if (theta := parameters.get("rope_theta")) and theta != (found.get("rope_theta") or _THETA):
        raise SpecError(
            f"rope_scaling replaces rope_parameters, and its rope_theta of {theta} would be lost; set rope_theta in "
            "rope_scaling, too"
        )
    return found


def _scaling(given: Settings, kind: str, default_factor: float, num_divisors: int) -> dict[str, Any]:
    numbers: dict[str, Any] = {key: given.real(key) for key in _REALS if key in given}
    numbers |= {key: given.real(key) for key in _SCALES if given.get(key)}
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
        numbers["factors"] = _divisors(given, "factors", num_divisors)
    if kind == "longrope":
        numbers["factors"] = _divisors(given, "short_factor", num_divisors)
        numbers["long_factors"] = _divisors(given, "long_factor", num_divisors)
    return numbers


def _divisors(given: Settings, name: str, count: int) -> tuple[float, ...]:
    """Read a divisor per frequency. Raises SpecError unless there are `count` positive numbers."""
    found = given.get(name)
    if found is None:
        raise KeyError(f"rope_scaling.{name}")
    is_list = isinstance(found, list) and len(found) == count
    if not is_list or not all(type(number) in (int, float) and 0 < number <= sys.float_info.max for number in found):
        raise SpecError(f"rope_scaling.{name} must be a list of {count} numbers above 0, one per rotated pair")
    return tuple(float(number) for number in found)
