"""What is drawn of each metric: PromQL, a unit and a legend, from how it is declared in router/telemetry/metrics.py.

Every router exports what each replica last said, so that of two routers' series of one replica only one may count: what
is a replica's is first taken once for each replica (`max by (replica, role)`), then summed.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.telemetry.metrics import Declared

_JOB = '{job=~"$job"}'
_WINDOW = "[$__rate_interval]"
_QUANTILES = (0.5, 0.9, 0.99)
_SPLIT = {  # counters of a router that are drawn by a label
    "requests_total": "outcome",
    "background_task_deaths_total": "task",
    "member_records_refused_total": "reason",
}
_UNITS = (  # the first ending that fits: of the metric itself, and of its rate
    ("bytes_per_second", "Bps", ""),
    ("_seconds_total", "", "percentunit"),
    ("_seconds", "s", ""),
    ("_bytes_total", "", "Bps"),
    ("tokens_total", "", "suffix: tokens/s"),
    ("_total", "", "ops"),
)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A diagram over time."""

    title: str
    description: str
    unit: str  # Grafana's name of it
    queries: tuple[tuple[str, str], ...]  # PromQL, and its legend

    @classmethod
    def of(cls, metric: Declared) -> Panel:
        """By the kind of the metric: rates of what counts, quantiles of what is spread."""
        return cls(
            title=_title(metric.name), description=metric.meaning, unit=_unit(metric.name), queries=_queries(metric)
        )


def once(name: str, *, where: str = "", window: str = "", more: str = "") -> str:
    """A replica's series, one for each replica. window: of its rate; empty: as it is. more: labels beside these."""
    series = name + _JOB.replace("}", f",{where}}}" if where else "}")
    series = f"rate({series}{window})" if window else series
    return f"max by (replica, role{more}) ({series})"


# What no single metric says.
REUSE = Panel(
    title="Prompt tokens that were not computed again",
    description="Of all prompt tokens of requests, the share that some replica held already.",
    unit="percentunit",
    queries=(
        (
            f"sum(rate(cached_prompt_tokens_total{_JOB}{_WINDOW})) / sum(rate(prompt_tokens_total{_JOB}{_WINDOW}))",
            "reused",
        ),
    ),
)
KV_USE = Panel(
    title="KV in use",
    description="Share of each replica's blocks that running sequences hold; cached prefixes count as room.",
    unit="percentunit",
    queries=((f"1 - ({once('kv_blocks_free')} + {once('kv_blocks_cached')}) / {once('kv_blocks')}", "{{replica}}"),),
)
REPLICAS = Panel(
    title="Replicas",
    description="That the routers hear of.",
    unit="none",
    queries=((f"count by (role) ({once('kv_blocks')})", "{{role}}"),),
)
ROUTERS = Panel(
    title="Routers",
    description="That answer Prometheus.",
    unit="none",
    queries=((f"sum(up{_JOB})", "routers"),),
)
ACCEPTED = Panel(
    title="Drafted tokens that were right",
    description="By method; nothing where nothing is drafted.",
    unit="percentunit",
    queries=(
        (
            "sum by (method) ({}) / sum by (method) ({}) or vector(0)".format(
                *(
                    once(f"speculation_{kind}_tokens_total", window=_WINDOW, more=", method, place")
                    for kind in ("accepted", "drafted")
                )
            ),
            "{{method}}",
        ),
    ),
)


def _queries(metric: Declared) -> tuple[tuple[str, str], ...]:
    name = metric.name
    if metric.kind == "histogram":
        rate = f"sum by (le) (rate({name}_bucket{_JOB}{_WINDOW}))"
        return tuple((f"histogram_quantile({q}, {rate})", f"P{round(100 * q)}") for q in _QUANTILES)
    if metric.is_draft:
        rate = once(name, window=_WINDOW, more=", method, place")
        return ((f"sum by (method, place) ({rate}) or vector(0)", "{{method}} {{place}}"),)
    if metric.is_replicas:
        return ((once(name, window=_WINDOW if metric.kind == "counter" else ""), "{{replica}}"),)
    if metric.kind == "gauge":
        return ((f"sum({name}{_JOB})", "all routers"),)
    if label := _SPLIT.get(name):
        return ((f"sum by ({label}) (rate({name}{_JOB}{_WINDOW})) or vector(0)", f"{{{{{label}}}}}"),)
    return ((f"sum(rate({name}{_JOB}{_WINDOW}))", "all routers"),)


def _title(name: str) -> str:
    words = name.removesuffix("_total").removesuffix("_seconds").replace("_", " ")
    return words.replace("kv ", "KV ").capitalize().replace("Kv ", "KV ")


def _unit(name: str) -> str:
    return next((unit or rate for ending, unit, rate in _UNITS if name.endswith(ending)), "short")
