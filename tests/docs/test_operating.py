"""Metrics that documents name exist, and the spec lists the built-in plugins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from core.rpc.worker_pb2 import Status
from core.spec.schema import Spec
from docs.generate.__main__ import ROOT, documents
from docs.generate.metrics import name_of
from engine.kv.eviction import EVICTIONS
from kvtransfer.links.backends import LINKS
from router.routing.policies import POLICIES
from router.telemetry.metrics import Metrics
from worker.metrics import metrics_registry

_METRIC = re.compile(r"`(xpyd_\w+)")
_KNOWN = {name_of(one) for one in (*Metrics().registry.collect(), *metrics_registry(Status, {}).collect())}


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_metrics_that_exist(path: Path) -> None:
    assert {*_METRIC.findall(path.read_text())} <= _KNOWN


@pytest.mark.parametrize(
    ("section", "key", "ours"),
    [("router", "policy", {*POLICIES}), ("kv", "eviction", {*EVICTIONS}), ("kv", "host_link", {*LINKS} - {"nccl"})],
)
def test_the_spec_names_what_the_tables_have(section: str, key: str, ours: set[str]) -> None:
    part = Spec.model_fields[section].default
    assert {*type(part).model_fields[key].examples} - {"MODULE:NAME"} == ours
