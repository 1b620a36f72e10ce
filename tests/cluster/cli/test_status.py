"""Text and exit code of `cluster status`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.status import as_text
from cluster.launch import status as launch_status
from cluster.launch.local_ray import LocalRay
from cluster.launch.router_admin import AdminAnswer
from cluster.launch.status import missing_at_routers
from core.types.errors import DeployError, NotDeployed
from tests.cluster.cli.command import CommandInProcess
from tests.cluster.deployments import make_state


@pytest.mark.parametrize(
    ("num_ready", "http_status", "tls", "text"),
    [(2, 200, "auto", "ready"), (2, 200, "off", "ready"), (1, 200, "files", "degraded"), (1, 503, "auto", "not ready")],
)
def test_deployment_without_all_replicas_is_degraded_and_one_without_tls_is_reported(
    num_ready: int, http_status: int, tls: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = {"desired": 2, "ready": num_ready, "replicas": [], "failures": [], "has_given_up": False}
    revision = {"number": 1, "update": None, "last_update": ""}
    report = {"pools": {"prefill": pool, "decode": pool}, "spec": {"security": {"tls": tls}}, "revision": revision}
    seen = {"replicas": {"prefill": num_ready, "decode": num_ready}}
    router = AdminAnswer("127.0.0.1:9", http_status, json.dumps(seen).encode())
    monkeypatch.setattr(launch_status.driver, "ask", lambda controller, method, within_s: report)
    monkeypatch.setattr(launch_status, "ask_routers", lambda state, path: [router])
    found = launch_status.read_status(make_state(admin=("x",)), None)
    assert as_text(found).startswith(f"a is {text}: prefill {num_ready}/2") and found["ready"] is (text == "ready")
    assert ("security.tls is off" in as_text(found)) is (tls == "off")


def test_router_that_sees_too_few_replicas_is_named_with_the_reason() -> None:
    def router(problem: str, **seen: int) -> AdminAnswer:
        return AdminAnswer("[::1]:8090", 503, json.dumps({"replicas": seen, "problem": problem}).encode())

    routers = [router("Redis refuses: full", prefill=1, decode=0), router("", prefill=1, decode=1), router("")]
    assert missing_at_routers(routers, {"prefill": 1, "decode": 1}) == [
        "the router at [::1]:8090 sees decode 0/1: Redis refuses: full",
        "the router at [::1]:8090 sees prefill 0/1 decode 0/1; see `cluster logs router`",
    ]
    assert missing_at_routers([], {"decode": 1}) == ["no router answers; see `cluster logs router`"]


def raising(error: Exception) -> Any:
    def fail(*arguments: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(("error", "code"), [(DeployError("no Ray answers"), 1), (NotDeployed("nothing"), 3)])
def test_exit_code(error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, cluster: CommandInProcess) -> None:
    monkeypatch.setattr("cluster.cli.status.find_state", raising(error))
    status = cluster.run("status")
    assert (status.code, status.err) == (code, f"cluster: {error}\n")


def test_routers_are_shown_if_the_controller_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, cluster: CommandInProcess, tmp_path: Path
) -> None:
    monkeypatch.setattr(LocalRay, "is_running", True)
    health = json.dumps({"replicas": {"prefill": 1, "decode": 2}}).encode()
    state = make_state(local_ray=LocalRay(str(tmp_path), 1))
    answer = AdminAnswer("127.0.0.1:9", 200, health)
    monkeypatch.setattr("cluster.cli.status.find_state", lambda name: state)
    monkeypatch.setattr("cluster.cli.status.join_controller", raising(DeployError("status: no answer")))
    monkeypatch.setattr("cluster.launch.router_admin.ask_here", lambda *arguments: [answer])
    status = cluster.run("status")
    assert status.code == 1 and status.err.splitlines() == [
        "cluster: status: no answer",
        "the router at 127.0.0.1:9 serves with prefill 1 decode 2",
        "gRPC g:1 · OpenAI http://h:2/v1",
    ]
