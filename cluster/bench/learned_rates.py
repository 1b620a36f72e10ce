"""Rates that replicas have learned from their own steps, parsed from a router's metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from core.types.errors import ClusterError
from core.types.request import BRANCHES, Role
from core.types.step_timing import StepTiming

_STEPS = {
    "base_s": "step_base_seconds",
    "token_s": "step_token_seconds",
    "pair_s": "step_pair_seconds",
    "context_s": "step_context_seconds",
}


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
        steps=steps,
        link_bytes_per_s=_mean(rates),
        drafted=_by_place(places["speculation_drafted_tokens_total"]),
        accepted=_by_place(places["speculation_accepted_tokens_total"]),
        num_row_steps=_row_steps(found),
    )


def _by_place(counts: dict[int, float]) -> list[float]:
    return [counts.get(place, 0.0) for place in range(max(counts, default=-1) + 1)]


def _row_steps(found: Mapping[tuple[str, str], list[float]]) -> float:
    tokens, each = found["replica_generated_tokens_total", Role.DECODE], found["step_tokens_per_row", Role.DECODE]
    return sum(count / max(1.0, per_row) for count, per_row in zip(tokens, each, strict=False))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
