"""Start of updates, and changes during one, without replicas."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.control.pool import ReplicaPool
from cluster.rollout.update import Phase, UpdateOptions
from cluster.rollout.updater import Updater
from core.spec.loader import parse_spec
from core.types.errors import SpecError
from core.types.request import Role
from tests.cluster.deployments import make_desired

OPTIONS = UpdateOptions(waits_for_nodes=True)
GRAPHS_OFF = {"engine": {"cuda_graphs": "off"}}


def updater() -> Updater:
    reporter: Any = SimpleNamespace(counts={}, begin=lambda: None, tell=lambda table: None)
    pools = {role: ReplicaPool(role, changed=lambda: None) for role in Role}
    return Updater(pools, reporter=reporter, save=lambda: None)


def test_repeated_update_is_idempotent_until_rolled_back() -> None:
    """Ray repeats calls after a crash; an operator who aborts and starts again wants another update."""
    here, desired, spec = updater(), make_desired(), parse_spec(GRAPHS_OFF)
    assert here.begin(desired, spec, OPTIONS)
    assert here.begin(desired, spec, OPTIONS) == []
    here.abort(desired, "aborted by an operator")
    with pytest.raises(SpecError, match="an update to revision 2 is under way \\(returning\\)"):
        here.begin(desired, spec, OPTIONS)
    assert desired.update and desired.update.phase is Phase.RETURNING


def test_update_does_not_undo_unseen_scaling() -> None:
    """Seconds pass between reading the spec and sending the update, and an autoscaler may act."""
    here, desired, seen = updater(), make_desired(), parse_spec({})
    desired.scale(Role.DECODE, 3)
    for spec in (parse_spec(GRAPHS_OFF), parse_spec({"timeouts": {"drain_s": 7}})):
        with pytest.raises(
            SpecError, match=r"was changed in the meantime \(decode.replicas: 1 -> 3\): run `cluster update` again"
        ):
            here.begin(desired, spec, OPTIONS, seen=seen)
    assert desired.update is None and desired.spec.decode.replicas == 3
    live = parse_spec({"timeouts": {"drain_s": 7}, "decode": {"replicas": 3}})
    assert here.begin(desired, live, OPTIONS, seen=desired.spec)
    assert here.begin(desired, live, OPTIONS, seen=seen) == [], "Ray repeats the call"


@pytest.mark.parametrize(
    "options", [{"canary_s": math.nan}, {"max_latency_factor": math.nan}, {"max_error_increase": -1.0}]
)
def test_invalid_limits_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"^--[a-z-]+ (nan|-1): must be a number >= 0$"):
        UpdateOptions(**options)


def test_autoscaler_turned_off_during_update_stays_off() -> None:
    rules = {"autoscale": {"max_devices": 4}}
    desired = make_desired(rules)
    updater().begin(desired, parse_spec(rules | GRAPHS_OFF), OPTIONS)
    desired.set_autoscale(None)
    assert desired.update and desired.spec.autoscale is desired.update.spec.autoscale is None
