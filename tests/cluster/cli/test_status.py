"""Text and exit code of `cluster status`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.cli.app import run
from cluster.cli.status import as_text
from cluster.control.report import RevisionReport
from cluster.launch import status as launch_status
from cluster.launch.local_ray import LocalRay
from cluster.launch.router_admin import AdminAnswer
from cluster.launch.state import State
from cluster.launch.status import DeploymentReport, missing_at_routers
from core.types.errors import DeployError, NotDeployed

_REVISION: RevisionReport = {"number": 1, "update": None, "last_update": ""}


@pytest.mark.parametrize("tls", ["auto", "files", "off"])
def test_unencrypted_deployment_is_reported(tls: str) -> None:
    report: DeploymentReport = {
        "name": "a",
        "ready": True,
        "serving": True,
        "missing": [],
        "endpoints": {"grpc": "127.0.0.1:50051", "http": "http://127.0.0.1:8000", "admin": []},
        "tls": tls,
        "pools": {},
        "revision": _REVISION,
    }
    assert ("security.tls is off" in as_text(report)) is (tls == "off")


@pytest.mark.parametrize(
    ("num_ready", "http_status", "text"), [(2, 200, "ready"), (1, 200, "degraded"), (1, 503, "not ready")]
)
def test_a_deployment_that_answers_without_all_replicas_is_degraded(
    num_ready: int, http_status: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = {"desired": 2, "ready": num_ready, "replicas": [], "failures": [], "has_given_up": False}
    report = {"pools": {"prefill": pool, "decode": pool}, "spec": {"security": {"tls": "auto"}}, "revision": _REVISION}
    seen = {"replicas": {"prefill": num_ready, "decode": num_ready}}
    router = AdminAnswer("127.0.0.1:9", http_status, json.dumps(seen).encode())
    state = State(name="a", ray_address="r", local_ray=None, grpc="g:1", http="h:2", admin=("x",), deploying=None)
    monkeypatch.setattr(launch_status.driver, "ask", lambda controller, method, within_s: report)
    monkeypatch.setattr(launch_status, "ask_routers", lambda state, path: [router])
    found = launch_status.read_status(state, None)
    assert as_text(found).startswith(f"a is {text}: prefill {num_ready}/2") and found["ready"] is (text == "ready")


def test_router_that_sees_too_few_replicas_is_named_with_the_reason() -> None:
    def router(problem: str, **seen: int) -> AdminAnswer:
        return AdminAnswer("[::1]:8090", 503, json.dumps({"replicas": seen, "problem": problem}).encode())

    routers = [router("Redis refuses: full", prefill=1, decode=0), router("", prefill=1, decode=1), router("")]
    assert missing_at_routers(routers, {"prefill": 1, "decode": 1}) == [
        "the router at [::1]:8090 sees decode 0/1: Redis refuses: full",
        "the router at [::1]:8090 sees prefill 0/1 decode 0/1; see `cluster logs router`",
    ]
    assert missing_at_routers([], {"decode": 1}) == ["no router answers; see `cluster logs router`"]


@pytest.mark.parametrize(("error", "code"), [(DeployError("no Ray answers"), 1), (NotDeployed("nothing"), 3)])
def test_exit_code(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find_state(name: str | None) -> None:
        raise error

    monkeypatch.setattr("cluster.cli.status.find_state", find_state)
    assert run(["status"]) == code
    assert capsys.readouterr().err == f"cluster: {error}\n"


def test_routers_are_shown_if_the_controller_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    here = LocalRay(str(tmp_path), 1)
    monkeypatch.setattr(LocalRay, "is_running", True)
    health = json.dumps({"replicas": {"prefill": 1, "decode": 2}}).encode()
    state = State(name="a", ray_address="r", local_ray=here, grpc="g:1", http="http://h:2", deploying=None)

    def join_controller(state: State) -> None:
        raise DeployError("status: no answer")

    monkeypatch.setattr("cluster.cli.status.find_state", lambda name: state)
    monkeypatch.setattr("cluster.cli.status.join_controller", join_controller)
    monkeypatch.setattr(
        "cluster.launch.router_admin.ask_here", lambda *arguments: [AdminAnswer("127.0.0.1:9", 200, health)]
    )
    assert run(["status"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "cluster: status: no answer",
        "the router at 127.0.0.1:9 serves with prefill 1 decode 2",
        "gRPC g:1 · OpenAI http://h:2/v1",
    ]
