"""In-place role switches by the controller, on a real Ray, with ranks without a model."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from core.types.errors import SpecError
from tests.cluster.control.deploying import Deploy, ids, is_settled
from tests.support.waiting import until


def pids(pools: dict[str, Any]) -> dict[str, int]:
    return {
        replica["id"]: replica["ranks"][0]["pid"]
        for pool in pools.values()
        for replica in pool["replicas"]
        if replica["ranks"]
    }


def test_replica_switches_and_returns_with_its_processes(deploy: Deploy) -> None:
    deployment = deploy({"prefill": {"replicas": 1}, "decode": {"replicas": 2}})
    before = pids(deployment.until_ready())
    assert deployment.call("switch", "decode-1") == "prefill-1"
    there = deployment.until_ready()
    assert pids(there) == {id: before[id] for id in ("prefill-0", "decode-0")} | {"prefill-1": before["decode-1"]}
    assert [replica["was"] for replica in there["prefill"]["replicas"]] == ["", "decode-1"]
    text = deployment.call("logs", "prefill-1")[0].text
    assert "prefill-1 goes on where decode-1 was drained" in text and f"{deployment.name}/prefill-1/0" in text
    with pytest.raises(SpecError, match="decode-1 has left already"):
        deployment.call("switch", "decode-1")
    with pytest.raises(SpecError, match="decode-0 is the only ready decode replica"):
        deployment.call("switch", "decode-0")

    # The restarted controller knows it by its new id.
    deployment.restart()
    assert pids(deployment.call("status")["pools"]) == pids(there)
    assert deployment.call("scale", {"prefill": 1, "decode": 2}) == {"prefill": (2, 1), "decode": (1, 2)}
    back = deployment.until_ready()
    assert pids(back) == {id: before[id] for id in ("prefill-0", "decode-0")} | {"decode-2": before["decode-1"]}
    os.kill(before["decode-1"], signal.SIGKILL)
    assert ids(deployment.until(lambda p: is_settled(p) and "decode-2" not in ids(p["decode"]))["decode"]) == [
        "decode-0",
        "decode-3",
    ]


def test_interrupted_switch_is_repaired(deploy: Deploy) -> None:
    deployment = deploy({"prefill": {"replicas": 1}, "decode": {"replicas": 3}}, decode="slow_drain")
    first = pids(deployment.until_ready())
    deployment.call("switch", "decode-2")
    waiting = deployment.until(lambda pools: pools["prefill"]["replicas"][-1]["stage"])
    assert waiting["prefill"]["replicas"][-1]["stage"] == "waits for decode-2 to drain"
    # The switch continues.
    deployment.restart()
    deployment.until(lambda pools: ids(pools["prefill"]) == ["prefill-0", "prefill-1"])
    assert deployment.call("switch", "decode-2") == "prefill-1", "a repeated call returns the same id"
    (deployment.log_dir / "decode-2.finished").touch()
    assert pids(deployment.until_ready())["prefill-1"] == first["decode-2"]

    # It is lost: another one starts in its new role.
    deployment.call("switch", "decode-1")
    deployment.until(lambda pools: ids(pools["prefill"])[-1] == "prefill-2")
    os.kill(first["decode-1"], signal.SIGKILL)
    after = deployment.until_ready()
    assert ids(after["prefill"]) == ["prefill-0", "prefill-1", "prefill-2"] and ids(after["decode"]) == ["decode-0"]
    assert pids(after)["prefill-2"] != first["decode-1"] and after["prefill"]["replicas"][2]["was"] == ""

    deployment.update({"prefill": {"kv_memory_gib": 2}}, waits_for_nodes=True)
    until(lambda: deployment.call("status")["revision"]["update"] is None, look_s=0.1)
    before = deployment.until_ready()
    with pytest.raises(SpecError, match=r"cannot switch to decode in place: the pools differ in kv_m"):
        deployment.call("switch", ids(before["prefill"])[0])
    deployment.call("scale", {"prefill": 2, "decode": 2})
    after = deployment.until_ready()
    assert len(ids(after["prefill"])) == 2 and ids(after["decode"])[0] == "decode-0"
    assert {*pids(after).values()} - {*pids(before).values()} == {pids(after)[ids(after["decode"])[1]]}, "it is new"
