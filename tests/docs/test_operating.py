"""The alerts of docs/OPERATING.md ask for metrics that there are, and the plugins' names are those of the spec."""

from __future__ import annotations

import re

import pytest

from core.rpc.worker_pb2 import Status
from core.spec.schema import Spec
from docs.generate.__main__ import ROOT
from docs.generate.metrics import name_of
from engine.kv.eviction import EVICTIONS
from kvtransfer.links.backends import LINKS
from router.routing.plain_policies import POLICIES
from router.telemetry.metrics import Metrics
from worker.metrics import metrics_registry

_PAGE = (ROOT / "docs" / "OPERATING.md").read_text()
_WORDS = {"by", "le", "and", "up", "job", "role", "outcome", "min", "sum", "rate", "histogram_quantile"}


def test_every_alert_asks_for_a_metric_that_there_is() -> None:
    families = [*Metrics().registry.collect(), *metrics_registry(Status, {}).collect()]
    known = {name_of(family) + ("_bucket" if family.type == "histogram" else "") for family in families}
    (alerts,) = re.findall(r"^```promql\n(.*?)^```", _PAGE, re.DOTALL | re.MULTILINE)
    bare = re.sub(r'#.*|"[^"]*"|\[\d+m\]', "", alerts)
    asked = set(re.findall(r"[a-z_]+", bare)) - _WORDS
    assert asked and asked <= known


@pytest.mark.parametrize(
    ("section", "key", "ours"),
    [("router", "policy", {*POLICIES}), ("kv", "eviction", {*EVICTIONS}), ("kv", "host_link", {*LINKS} - {"nccl"})],
)
def test_the_spec_names_what_the_tables_have(section: str, key: str, ours: set[str]) -> None:
    part = Spec.model_fields[section].default
    assert {*type(part).model_fields[key].examples} - {"MODULE:NAME"} == ours
