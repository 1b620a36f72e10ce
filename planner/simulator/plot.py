"""Plot of the frontier with matplotlib, an optional dependency (`pip install xpyd[plot]`)."""

from __future__ import annotations

from pathlib import Path

from core.types.errors import SpecError
from planner.simulator.plan import CapacityPlan


def plot(plan: CapacityPlan, path: Path, *, good_share: float) -> None:
    """Write a PNG or SVG, by the file's suffix. Raises SpecError without matplotlib or for another suffix."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SpecError("a plot needs matplotlib: pip install 'xpyd[plot]'") from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(good_share, color="0.7", linestyle="--", label="target")
    tried, frontier = plan.tried, plan.frontier
    axes.scatter([c.usd_per_hour for c in tried], [c.good_share for c in tried], color="0.6", label="tried")
    axes.step(
        [c.usd_per_hour for c in frontier], [c.good_share for c in frontier], where="post", marker="o", label="frontier"
    )
    for candidate in frontier:
        place = (candidate.usd_per_hour, candidate.good_share)
        axes.annotate(candidate.topology, place, textcoords="offset points", xytext=(4, -12))
    axes.set_xlabel("USD per hour")
    axes.set_ylabel("share of requests within the SLO")
    axes.margins(x=0.15, y=0.15)  # room for the labels beside the points
    figure.legend(loc="outside upper center", ncols=3)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise SpecError(f"{path}: {error}") from None
