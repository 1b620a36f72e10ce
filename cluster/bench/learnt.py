"""The rates that a deployment's replicas have learnt of themselves, as its router exports them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from cluster.words.errors import ClusterError
from cluster.words.request import Role
from cluster.words.timing import StepTiming

_STEPS = {
    "base_s": "step_base_seconds",
    "token_s": "step_token_seconds",
    "pair_s": "step_pair_seconds",
    "context_s": "step_context_seconds",
}


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """The mean over the replicas of a role."""

    steps: dict[Role, StepTiming]
    link_bytes_per_s: float


def parse_learnt(text: str) -> Learnt:
    """From a router's metrics. Raises ClusterError when its replicas have done nothing yet."""
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, sample.labels.get("role", "")].append(sample.value)
    steps = {
        role: StepTiming(**{field: _mean(found[name, role.value]) for field, name in _STEPS.items()})
        for role in Role
        if found[_STEPS["base_s"], role.value]
    }
    rates = [rate for role in Role for rate in found["link_bytes_per_second", role.value] if rate]
    if len(steps) < len(Role) or not rates:
        raise ClusterError("the replicas have not learnt their rates yet: run a load, such as `cluster bench`, first")
    return Learnt(steps=steps, link_bytes_per_s=_mean(rates))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
