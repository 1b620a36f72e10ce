"""Rates that the replicas of a deployment have learned about themselves, as a router reports them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from statistics import mean
from typing import Any

from core.types.errors import ClusterError
from core.types.request import Role
from core.types.step_timing import StepTiming


@dataclass(frozen=True, kw_only=True)
class LearnedRates:
    """Learned rates, averaged over the replicas of a role."""

    steps: dict[Role, StepTiming]
    link_bytes_per_s: float
    drafted: list[float]  # tokens by their position in a draft, of all decode replicas since they started
    accepted: list[float]
    num_row_steps: float  # steps, each counted once per row; approximate


def learned_rates(replicas: Sequence[Mapping[str, Any]]) -> LearnedRates:
    """Return the rates of `replicas`, as RouterView shows them. Raises ClusterError if they have served nothing yet."""
    timings = {role: [one["timing"] for one in replicas if one["role"] == role and one["timing"]] for role in Role}
    links = [one["link_bytes_per_s"] for one in replicas if one["link_bytes_per_s"]]
    if not links or not all(timings.values()):
        raise ClusterError("the replicas have not learned their rates yet: run a load, such as `cluster bench`, first")
    drafts = [draft for one in replicas for draft in one["drafts"]]
    decode = [one for one in replicas if one["role"] == Role.DECODE]
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
