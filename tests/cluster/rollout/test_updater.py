"""Start of updates, and changes during one, without replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from cluster.control.desired_state import Desired
from cluster.control.pool import RolePools
from cluster.rollout.update import Phase, UpdateOptions
from cluster.rollout.updater import Updater
from core.identity.deployment_secrets import DeploymentSecrets
from core.spec.loader import parse_spec
from core.spec.schema import Spec
from core.types.errors import SpecError
from core.types.launch import Launch
from core.types.request import Role
from core.types.revisions import RevisionCounts, RevisionTable

OPTIONS = UpdateOptions(waits_for_nodes=True)


class FakeReporter:
    """Reporter without receivers."""

    counts: Mapping[int, RevisionCounts] = {}

    def begin(self) -> None:
        pass

    def tell(self, table: RevisionTable) -> None:
        pass


def updater() -> Updater:
    pools = {role: RolePools(role, changed=lambda: None) for role in Role}
    return Updater(pools, reporter=FakeReporter(), save=lambda: None)  # type: ignore[arg-type]


def deployed(**sections: object) -> Desired:
    launch = Launch(
        spec=make_spec(**sections), log_dir="/logs", credentials=DeploymentSecrets.new(index_url="redis://h")
    )
    return Desired(launch=launch)


def make_spec(**sections: object) -> Spec:
    return parse_spec({"name": "kept", **sections})


def test_repeated_update_is_idempotent_until_rolled_back() -> None:
    """Ray repeats calls after a crash; an operator who aborts and starts again wants another update."""
    here, desired, spec = updater(), deployed(), make_spec(engine={"cuda_graphs": "off"})
    assert here.begin(desired, spec, OPTIONS)
    assert here.begin(desired, spec, OPTIONS) == []
    here.abort(desired, "aborted by an operator")
    with pytest.raises(SpecError, match="an update to revision 2 is under way \\(returning\\)"):
        here.begin(desired, spec, OPTIONS)
    assert desired.update and desired.update.phase is Phase.RETURNING


def test_update_does_not_undo_unseen_scaling() -> None:
    """Seconds pass between reading the spec and sending the update, and an autoscaler may act."""
    here, desired, seen = updater(), deployed(), make_spec()
    desired.scale(Role.DECODE, 3)
    for spec in (make_spec(engine={"cuda_graphs": "off"}), make_spec(timeouts={"drain_s": 7})):
        with pytest.raises(
            SpecError, match=r"was changed in the meantime \(decode.replicas: 1 -> 3\): run `cluster update` again"
        ):
            here.begin(desired, spec, OPTIONS, seen=seen)
    assert desired.update is None and desired.spec.decode.replicas == 3
    live = make_spec(timeouts={"drain_s": 7}, decode={"replicas": 3})
    assert here.begin(desired, live, OPTIONS, seen=desired.spec)
    assert here.begin(desired, live, OPTIONS, seen=make_spec()) == [], "Ray repeats the call"


@pytest.mark.parametrize(
    "options", [{"canary_s": math.nan}, {"max_latency_factor": math.nan}, {"max_error_increase": -1.0}]
)
def test_invalid_limits_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"^--[a-z-]+ (nan|-1): must be a number >= 0$"):
        UpdateOptions(**options)


def test_autoscaler_turned_off_during_update_stays_off() -> None:
    rules = {"max_devices": 4}
    desired = deployed(autoscale=rules)
    updater().begin(desired, make_spec(autoscale=rules, engine={"cuda_graphs": "off"}), OPTIONS)
    desired.set_autoscale(None)
    assert desired.update and desired.spec.autoscale is desired.update.spec.autoscale is None
