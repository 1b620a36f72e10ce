"""Updates by a controller on a real Ray, with ranks without a model."""

from __future__ import annotations

from typing import Any

import pytest

from core.types.errors import SpecError
from tests.cluster.control.deploying import SMALL, Deploy, Deployment, ids
from tests.support.waiting import until


def until_over(deployment: Deployment) -> str:
    """Wait for the update to end. Returns its outcome."""
    report: dict[str, Any] = {}

    def is_over() -> bool:
        report.update(deployment.call("status"))
        pools = report["pools"].values()
        assert all(pool["ready"] for pool in pools), "a gap"
        return report["revision"]["update"] is None

    until(is_over, look_s=0.1)
    last: str = report["revision"]["last_update"]
    return last


def test_update_replaces_affected_role_and_survives_controller_restart(deploy: Deploy) -> None:
    deployment = deploy(SMALL)
    deployment.until_ready()
    assert deployment.update({"decode": {"max_running": 8}, "prefill": {"replicas": 2}})
    with pytest.raises(SpecError, match="an update to revision 2 is under way"):
        deployment.update({"decode": {"max_running": 9}})
    with pytest.raises(SpecError, match="pool sizes cannot change until it ends"):
        deployment.call("scale", {"decode": 2})
    deployment.until(lambda pools: len(pools["decode"]["replicas"]) == 2)
    deployment.restart()
    assert until_over(deployment) == "revision 2 serves"
    pools = deployment.until_ready()
    assert "decode-0" not in ids(pools["decode"]) and ids(pools["prefill"]) == ["prefill-0", "prefill-1"]
    report = deployment.call("status")
    assert report["spec"]["decode"]["max_running"] == 8 and report["revision"]["number"] == 2
    with pytest.raises(SpecError, match="prefill-0 was started before an update changed the decode pool"):
        deployment.call("switch", "prefill-0")


def test_failing_revision_is_rolled_back(deploy: Deploy) -> None:
    deployment = deploy(SMALL)
    before = deployment.until_ready()
    (deployment.log_dir / "fails").touch()  # from now on
    deployment.update({"engine": {"cuda_graphs": "off"}})
    assert "was rolled back: " in until_over(deployment)
    pools = deployment.until_ready()
    assert all(ids(pools[role]) == ids(before[role]) for role in pools)
    assert deployment.call("status")["spec"]["engine"]["cuda_graphs"] == "auto"


def test_operator_aborts_a_canary(deploy: Deploy) -> None:
    deployment = deploy(SMALL)
    deployment.until_ready()
    with pytest.raises(SpecError, match="no update is under way"):
        deployment.call("abort_update")
    deployment.update({"engine": {"cuda_graphs": "off"}}, canary=0.25, canary_s=3600.0)
    until(lambda: deployment.call("status")["revision"]["update"]["share"] == 0.25, look_s=0.1)
    assert all(len(pool["replicas"]) == 2 for pool in deployment.call("status")["pools"].values())
    assert deployment.call("abort_update") == 1
    assert until_over(deployment) == "revision 2 was rolled back: aborted by an operator"


def test_live_change_replaces_nothing(deploy: Deploy) -> None:
    deployment = deploy(SMALL)
    before = deployment.until_ready()
    assert not deployment.update({"timeouts": {"drain_s": 7}, "decode": {"replicas": 2}})
    pools = deployment.until(lambda pools: pools["decode"]["ready"] == 2)
    assert set(ids(pools["decode"])) > set(ids(before["decode"])) and ids(pools["prefill"]) == ids(before["prefill"])
