"""The controller on a real Ray, with ranks without a model."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.control.gang import find_replicas
from cluster.launch import driver
from core.identity.authority import KeyPair
from core.types.errors import DeployError, SpecError
from tests.cluster.control.deploying import SMALL, Deploy, Deployment, ids, is_alive
from tests.core.identity.authorities import issue_authority
from tests.support.identities import rank
from tests.support.waiting import until


def pids(pool: dict[str, Any]) -> list[int]:
    return [rank["pid"] for replica in pool["replicas"] for rank in replica["ranks"]]


def await_death(pids: list[int]) -> None:
    """Wait for processes to end; Ray reports an actor as dead slightly earlier."""
    until(lambda: not any(is_alive(pid) for pid in pids))


def test_all_ranks_serve(deploy: Deploy) -> None:
    pools = deploy({"prefill": {"replicas": 1, "tensor_parallel": 2}, "decode": {"replicas": 2}}).until_ready()
    assert ids(pools["prefill"]) == ["prefill-0"]
    assert ids(pools["decode"]) == ["decode-0", "decode-1"]
    assert len(set(pids(pools["prefill"]) + pids(pools["decode"]))) == 4
    replica = pools["prefill"]["replicas"][0]
    assert replica["state"] == "ready" and replica["node"]
    assert replica["blocks"] == {"total": 100, "free": 90, "cached": 10}


def test_killed_rank_replaces_the_whole_gang(deploy: Deploy) -> None:
    deployment = deploy({"prefill": {"replicas": 1, "tensor_parallel": 2}, "decode": {"replicas": 1}})
    before = deployment.until_ready()
    os.kill(pids(before["prefill"])[1], signal.SIGKILL)

    after = deployment.until(lambda pools: ids(pools["prefill"]) == ["prefill-1"] and pools["prefill"]["ready"])
    await_death(pids(before["prefill"]))
    assert ids(after["decode"]) == ["decode-0"] and pids(after["decode"]) == pids(before["decode"])
    failure = after["prefill"]["failures"][0]
    assert failure["replica"] == "prefill-0"
    assert failure["text"].endswith("failed (ready): the process of rank 1 died: killed, out of memory, or crashed")


def test_restarted_controller_adopts_replicas(deploy: Deploy) -> None:
    deployment = deploy(SMALL)
    deployment.until_ready()
    deployment.call("scale", {"decode": 2})
    before = deployment.until_ready()
    deployment.restart()

    # Its first answer includes all replicas.
    after = deployment.call("status")["pools"]
    assert [pids(after[role]) for role in after] == [pids(before[role]) for role in before]
    deployment.call("scale", {"prefill": 2})
    grown = deployment.until_ready()["prefill"]
    assert ids(grown) == ["prefill-0", "prefill-1"], grown["failures"]
    # Adopted ranks are watched.
    os.kill(pids(before["decode"])[0], signal.SIGKILL)
    deployment.until(lambda pools: "decode-2" in ids(pools["decode"]))


def test_loading_gang_shows_its_progress_and_is_removed_by_a_restarted_controller(deploy: Deploy) -> None:
    deployment = deploy({**SMALL, "prefill": {"tensor_parallel": 2}}, prefill="slow_load")
    loading = deployment.until(lambda pools: pids(pools["prefill"]) and pools["prefill"]["replicas"][0]["fraction"])
    replica = loading["prefill"]["replicas"][0]
    assert (replica["state"], replica["stage"], replica["fraction"]) == ("loading", "reading weights", 0.25)
    deployment.restart()
    deployment.until(lambda pools: ids(pools["prefill"]) == ["prefill-1"])
    await_death(pids(loading["prefill"]))


def test_down_without_controller_removes_leftovers(three_nodes: str, tmp_path: Path) -> None:
    deployment = Deployment(tmp_path / "logs", SMALL)
    pools = deployment.until_ready()
    driver.remove_by_force(deployment.name)
    await_death(pids(pools["prefill"]) + pids(pools["decode"]))
    until(lambda: driver.find_controller(deployment.name) is None)
    assert not find_replicas(deployment.name)


def test_scale_changes_only_the_named_pool(deploy: Deploy) -> None:
    deployment = deploy(SMALL)
    before = deployment.until_ready()
    assert deployment.call("scale", {"prefill": 3}) == {"prefill": (1, 3)}
    grown = deployment.until_ready()
    assert ids(grown["prefill"]) == ["prefill-0", "prefill-1", "prefill-2"]
    assert pids(grown["decode"]) == pids(before["decode"])

    deployment.call("scale", {"prefill": 1})
    shrunk = deployment.until_ready()
    assert ids(shrunk["prefill"]) == ["prefill-0"], "the busy one stays"
    deployment.call("scale", {"prefill": 0, "decode": 2})
    assert ids(deployment.until_ready()["decode"]) == ["decode-0", "decode-1"]
    with pytest.raises(DeployError, match=r"decode: room for \d+ of 4094 replicas; each replica needs 0.25 CPU"):
        deployment.call("scale", {"decode": 4096})
    with pytest.raises(SpecError, match="between 0 and 4096"):
        deployment.call("scale", {"decode": 4097}, wait_for_nodes=True)
    assert deployment.pool("decode")["desired"] == 2


def test_leaving_replica_finishes_its_work(deploy: Deploy) -> None:
    deployment = deploy(SMALL, decode="slow_drain")
    [pid] = pids(deployment.until_ready()["decode"])
    deployment.call("scale", {"decode": 0})
    pools = deployment.until(lambda pools: pools["decode"]["replicas"][0]["state"] == "draining")
    assert pools["decode"]["ready"] == 0 and is_alive(pid)

    # Draining continues after a restart.
    deployment.restart()
    deployment.until(lambda pools: [r["state"] for r in pools["decode"]["replicas"]] == ["draining"])
    (deployment.log_dir / "decode-0.finished").touch()
    deployment.until_ready()
    await_death([pid])


def test_drain_has_a_time_limit(deploy: Deploy) -> None:
    deployment = deploy({**SMALL, "timeouts": {"drain_s": 0.3}}, decode="slow_drain")
    deployment.until_ready()
    deployment.call("scale", {"decode": 0})
    deployment.until_ready()


def test_drained_replica_is_replaced(deploy: Deploy) -> None:
    deployment = deploy(SMALL)
    deployment.until_ready()
    deployment.call("drain", "decode-0")
    assert ids(deployment.until(lambda pools: ids(pools["decode"]) == ["decode-1"])["decode"]) == ["decode-1"]
    with pytest.raises(SpecError, match="replica decode-7 not found; available: prefill-0, decode-1"):
        deployment.call("drain", "decode-7")
    with pytest.raises(SpecError, match="decode-0 has left already"):
        deployment.call("drain", "decode-0")


@pytest.mark.parametrize(
    ("fault", "num_ranks", "reason", "log"),
    [
        ("raises_in_load", 2, "rank 0: ValueError: weights.safetensors is cut short", "loading with 2 ranks"),
        ("dies_in_load", 2, "the process of rank 0 died: killed, out of memory, or crashed", "about to die"),
        (
            "no_such_class",
            # Otherwise any rank could fail first.
            1,
            "rank 0: AttributeError: module 'tests.cluster.control.fake_rank' has no attribute 'no_such_class'",
            "",
        ),
    ],
)
def test_failed_start_is_explained(deploy: Deploy, fault: str, num_ranks: int, reason: str, log: str) -> None:
    spec = {"prefill": {"replicas": 1, "tensor_parallel": num_ranks}, "decode": {"replicas": 0}}
    deployment = deploy(spec, prefill=fault)
    pools = deployment.until(lambda pools: pools["prefill"]["failures"])
    failure = pools["prefill"]["failures"][0]
    assert failure["reason"] == reason
    assert failure["will_repeat"] == (fault != "dies_in_load")
    assert failure["node"] and failure["replica"] == "prefill-0"
    assert log in deployment.call("logs", "prefill-0", lines=5)[0].text
    assert failure["text"] == f"prefill-0 on {failure['node']} did not start ({failure['state']}): {reason}"


def test_failed_starts_back_off(deploy: Deploy) -> None:
    deployment = deploy({"prefill": {"replicas": 2}, "decode": {"replicas": 0}}, prefill="raises_in_load")
    pool = deployment.until(lambda pools: pools["prefill"]["failed_rounds"] >= 2)["prefill"]
    assert len(pool["failures"]) <= 2 * pool["failed_rounds"], "two replicas that fail together are one round"


def test_pools_are_placed_by_labels(deploy: Deploy) -> None:
    spec = {
        "prefill": {"replicas": 2, "tensor_parallel": 2, "labels": {"pool": "prefill"}},
        "decode": {"replicas": 3, "labels": {"pool": "in(decode, gpu)"}},
    }
    deployment = deploy(spec)
    deployment.until_ready()
    pool_of_node = {node["NodeID"]: node["Labels"].get("pool") for node in ray.nodes()}
    for group in ray.util.placement_group_table().values():
        if group["name"].startswith(f"xpyd-{deployment.name}/"):
            role = group["name"].partition("/")[2].partition("-")[0]
            assert {pool_of_node[node] for node in group["bundles_to_node_id"].values()} == {role}


def test_replicas_of_a_pool_are_spread_over_nodes(deploy: Deploy) -> None:
    """A failing host then takes few of them."""
    deployment = deploy({"prefill": {"replicas": 3}, "decode": {"replicas": 0}})
    replicas = deployment.until_ready()["prefill"]["replicas"]
    groups = [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]
    homes = [g["bundles_to_node_id"][0] for g in groups if g["name"].startswith(f"xpyd-{deployment.name}/")]
    assert len(set(homes)) == len(homes) == len(replicas) == 3


def test_logs_of_running_and_ended_replicas(deploy: Deploy) -> None:
    deployment = deploy(SMALL)
    pools = deployment.until_ready()
    for name, text in (("decode-0", "loading with 1 ranks"), ("controller", "replica=decode-0 state=ready")):
        part = deployment.call("logs", name, lines=100)[0]
        assert text in part.text and deployment.call("logs", name, starts={0: part.end})[0].text == ""
    os.kill(pids(pools["decode"])[0], signal.SIGKILL)
    deployment.until(lambda pools: "decode-0" not in ids(pools["decode"]))
    assert deployment.call("logs", "decode-0", lines=1)[0].text == "loading with 1 ranks\n"
    with pytest.raises(SpecError, match="replica decode-9 not found"):
        deployment.call("logs", "decode-9")
    assert deployment.call("logs", "router") == {}  # this deployment has no router
    for name, text in (("2-b", "second\n"), ("1-a", "first\n")):
        (deployment.log_dir / f"router-{name}.log").write_text(text)
    found = deployment.call("logs", "router", starts={1: 3})
    assert [(number, part.text) for number, part in found.items()] == [(0, "first\n"), (1, "ond\n")]


def test_restarted_controller_issues_with_the_same_authority(deploy: Deploy) -> None:
    deployment = deploy(SMALL)
    name, keys = rank("decode-0", deployment=deployment.name), KeyPair()
    before = deployment.call("certify", name, keys.request)
    deployment.restart()
    after = deployment.call("certify", name, keys.request)
    assert (after.authorities, after.life_s) == (before.authorities, before.life_s)
    assert after.chain != before.chain
    with pytest.raises(SpecError, match="is not a process of"):
        deployment.call("certify", rank("decode-0", deployment="neighbour"), keys.request)


@pytest.mark.parametrize("tls", ["auto", *(pytest.param(tls, marks=pytest.mark.slow) for tls in ("files", "off"))])
def test_each_rank_has_its_own_certificate(deploy: Deploy, tls: str, tmp_path: Path) -> None:
    security = {"tls": tls}
    if tls == "files":
        root = issue_authority("root")
        security["ca"], _ = root.write(tmp_path, "root")
        security["certificate"], security["key"] = issue_authority("issuing", root).write(tmp_path, "issuing")
    deployment = deploy({**SMALL, "security": security})
    deployment.until_ready()
    logs = {replica: deployment.call("logs", replica)[0].text for replica in ("prefill-0", "decode-0")}
    for replica, text in logs.items():
        assert (f"by xpyd://{deployment.name}/{replica}/0" in text) is (tls != "off")
        assert "PRIVATE KEY" not in text


def test_pending_replica_reports_what_it_waits_for_and_stop_leaves_nothing(deploy: Deploy) -> None:
    deployment = deploy({"prefill": {"labels": {"pool": "gpu"}}, "decode": {"replicas": 2}})
    pools = deployment.until(lambda now: now["prefill"]["replicas"][0]["stage"] and now["decode"]["ready"] == 2)
    replica = pools["prefill"]["replicas"][0]
    assert replica["state"] == "pending"
    assert replica["stage"] == "no node has the labels pool=gpu; nodes have pool=decode, pool=prefill"
    deployment.call("stop")
    await_death(pids(pools["decode"]))
    groups = ray.util.placement_group_table().values()
    assert not [g for g in groups if g["name"].startswith(f"xpyd-{deployment.name}/") and g["state"] != "REMOVED"]
