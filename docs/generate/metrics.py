"""Every metric, for deploy/monitoring/README.md."""

from __future__ import annotations

from docs.generate.table import table
from router.telemetry.metrics import declared


def table_text() -> str:
    return table(
        ("metric", "type", "meaning"), [(f"`{metric.name}`", metric.kind, metric.meaning) for metric in declared()]
    )
