"""What an update may begin beside, and what changes while it runs; without the replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from cluster.control.desired_state import Desired
from cluster.rollout.role_pools import RolePools
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


class FakeTeller:
    """Nobody listens."""

    counts: Mapping[int, RevisionCounts] = {}

    def begin(self) -> None:
        pass

    def tell(self, table: RevisionTable) -> None:
        pass


def updater() -> Updater:
    pools = {role: RolePools(role, changed=lambda: None) for role in Role}
    return Updater(pools, reporter=FakeTeller(), save=lambda: None)  # type: ignore[arg-type]


def deployed(**sections: object) -> Desired:
    launch = Launch(spec=wanted(**sections), log_dir="/logs", credentials=DeploymentSecrets.new(index_url="redis://h"))
    return Desired(launch=launch)


def wanted(**sections: object) -> Spec:
    return parse_spec({"name": "kept", **sections})


def test_the_same_update_asked_again_is_one_but_not_once_it_was_taken_back() -> None:
    """Ray asks again where a controller has died; an operator who aborts and begins anew asks for another."""
    here, desired, spec = updater(), deployed(), wanted(engine={"cuda_graphs": "off"})
    assert here.begin(desired, spec, OPTIONS)
    assert here.begin(desired, spec, OPTIONS) == []
    here.abort(desired, "an operator has taken it back")
    with pytest.raises(SpecError, match="an update to revision 2 is under way \\(returning\\)"):
        here.begin(desired, spec, OPTIONS)
    assert desired.update and desired.update.phase is Phase.RETURNING


def test_what_was_scaled_since_the_operator_looked_is_not_undone_unseen() -> None:
    """Between `cluster update` asking what there is and saying what there shall be lie seconds, and an autoscaler."""
    here, desired, seen = updater(), deployed(), wanted()
    desired.scale(Role.DECODE, 3)
    for spec in (wanted(engine={"cuda_graphs": "off"}), wanted(timeouts={"drain_s": 7})):
        with pytest.raises(
            SpecError, match=r"was changed meanwhile \(decode.replicas: 1 -> 3\): `cluster update` again"
        ):
            here.begin(desired, spec, OPTIONS, seen=seen)
    assert desired.update is None and desired.spec.decode.replicas == 3
    live = wanted(timeouts={"drain_s": 7}, decode={"replicas": 3})
    assert here.begin(desired, live, OPTIONS, seen=desired.spec)
    assert here.begin(desired, live, OPTIONS, seen=wanted()) == [], "Ray asks again"


@pytest.mark.parametrize(
    "options", [{"canary_s": math.nan}, {"max_latency_factor": math.nan}, {"max_error_increase": -1.0}]
)
def test_a_limit_that_is_no_number_or_negative_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"^--[a-z-]+ (nan|-1): must be a number from 0 on$"):
        UpdateOptions(**options)


def test_an_autoscaler_that_is_turned_off_during_an_update_stays_off() -> None:
    rules = {"max_devices": 4}
    desired = deployed(autoscale=rules)
    updater().begin(desired, wanted(autoscale=rules, engine={"cuda_graphs": "off"}), OPTIONS)
    desired.set_autoscale(None)
    assert desired.update and desired.spec.autoscale is desired.update.spec.autoscale is None
