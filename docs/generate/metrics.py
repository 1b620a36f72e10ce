"""Every metric, for docs/OPERATING.md."""

from __future__ import annotations

from docs.generate.table import table
from router.metrics import Metrics


def table_of_metrics() -> list[tuple[str, str, str]]:
    """(name, type, meaning), in the order in which they are exported."""
    metrics = Metrics()
    metrics.watch(list)
    return [
        (family.name + ("_total" if family.type == "counter" else ""), family.type, family.documentation)
        for family in metrics.registry.collect()
    ]


def table_text() -> str:
    return table(("metric", "type", "meaning"), [(f"`{name}`", kind, text) for name, kind, text in table_of_metrics()])
