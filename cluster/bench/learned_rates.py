"""Rates that replicas have learned from their own steps, parsed from a router's metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from statistics import mean
from typing import Any

from core.types.errors import ClusterError
from core.types.request import BRANCHES, Role
from core.types.step_timing import StepTiming


@dataclass(frozen=True, kw_only=True)
class LearnedRates:
    """Learned rates, averaged over the replicas of a role."""

    steps: dict[Role, StepTiming]
    link_bytes_per_s: float
    # Tokens by position in a draft, over all decode replicas since they started.
    drafted: list[float]
    accepted: list[float]
    # Approximate sum over steps of the rows in each.
    num_row_steps: float


def parse_learned(text: str) -> LearnedRates:
    """Parse a router's metrics. Raises ClusterError if the replicas have not run enough steps."""
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    places: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, sample.labels.get("role", "")].append(sample.value)
            if "place" in sample.labels and sample.labels.get("method") != BRANCHES:
                counts, place = places[sample.name], int(sample.labels["place"])
                counts[place] = counts.get(place, 0.0) + sample.value
    steps = {
        role: StepTiming(**{field: _mean(found[name, role.value]) for field, name in _STEPS.items()})
        for role in Role
        if found[_STEPS["base_s"], role.value]
    }
    rates = [rate for role in Role for rate in found["link_bytes_per_second", role.value] if rate]
    if len(steps) < len(Role) or not rates:
        raise ClusterError("the replicas have not learned their rates yet; run a load first, such as `cluster bench`")
    return LearnedRates(
        steps={
            role: StepTiming(**{field.name: mean(one[field.name] for one in found) for field in fields(StepTiming)})
            for role, found in timings.items()
        },
        link_bytes_per_s=mean(links),
        drafted=_by_position(draft["tokens"] for draft in drafts),
        accepted=_by_position(draft["accepted"] for draft in drafts),
        num_row_steps=sum(one["generated_tokens"] / max(1.0, one["tokens_per_row"]) for one in decode),
    )


def _by_position(counts: Iterable[Sequence[float]]) -> list[float]:
    return [sum(at) for at in zip_longest(*counts, fillvalue=0.0)]
