"""Every metric, for deploy/monitoring/README.md."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric

from core.rpc.worker_pb2 import Status
from docs.generate.table import table
from router.telemetry.metrics import Metrics
from worker.metrics import metrics_registry


def table_text() -> str:
    routers, workers = Metrics().registry.collect(), metrics_registry(Status, {}).collect()
    return f"Of each router:\n\n{_table(routers)}\n\nOf each replica:\n\n{_table(workers)}"


def _table(families: Iterable[Metric]) -> str:
    return table(
        ("metric", "type", "meaning"), [(f"`{name_of(one)}`", one.type, one.documentation) for one in families]
    )


def name_of(family: Metric) -> str:
    """Return the exported name; prometheus_client drops `_total` from the name of a family of counters."""
    return family.name + ("_total" if family.type == "counter" else "")
