"""`cluster update`: dry runs, and outcomes of updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import cluster.cli.update
from cluster.cli.app import run
from cluster.launch import driver, preflight
from core.spec.loader import parse_spec
from core.spec.schema import Spec
from core.types.errors import SpecError

SPEC = parse_spec({"name": "a", "decode": {"replicas": 2}}).model_dump(mode="json")
REPLICA = {"state": "ready", "node": "", "stage": "", "fraction": 0.0}
POOLS = {role: {"replicas": [{"id": f"{role}-0", **REPLICA}], "failures": []} for role in ("prefill", "decode")}


class FakeController:
    """Controller that returns scripted update states in sequence."""

    def __init__(self, *steps: tuple[str, str]) -> None:
        """steps: (phase, text of the last update); an empty phase means that the update has ended."""
        self.methods: list[str] = []
        self._steps = list(steps)

    def ask(self, controller: object, method: str, *args: Any, **kwargs: Any) -> Any:
        self.methods.append(method)
        if method == "status":
            phase, last = self._steps.pop(0) if "update" in self.methods else ("", "")
            update = {"revision": 2, "phase": phase, "reason": "it is slow", "step": "1 of 2", "share": 0.5}
            report = {"number": 1, "update": update if phase else None, "last_update": last}
            return {"spec": SPEC, "pools": POOLS, "revision": report}
        return True


@pytest.fixture
def controlled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeController]:
    def make(*steps: tuple[str, str]) -> FakeController:
        fake = FakeController(*steps)
        monkeypatch.setattr(cluster.cli.update, "find_state", lambda name: None)
        monkeypatch.setattr(cluster.cli.update, "join_controller", lambda state: fake)
        monkeypatch.setattr(driver, "ask", fake.ask)
        monkeypatch.setattr(preflight, "check_model", lambda spec, say: None)
        return fake

    return make


def update(*arguments: str) -> int:
    return run(["update", *arguments])


def test_dry_run_prints_changes_and_requests_nothing(
    controlled: Callable[..., FakeController], capsys: pytest.CaptureFixture[str]
) -> None:
    fake = controlled()
    assert update("--set", "decode.max_running=32", "--set", "timeouts.drain_s=9", "--dry-run") == 0
    output = capsys.readouterr().out
    assert "decode.max_running: 64 -> 32    new decode replicas" in output
    assert "prefill: prefill-0 kept" in output and "decode: decode-0 replaced" in output
    assert fake.methods == ["status"]
    assert update("--set", "router.http_port=9", "--dry-run") == 0
    assert "an update cannot do this" in capsys.readouterr().out


def test_dry_run_checks_local_sources(
    controlled: Callable[..., FakeController], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    controlled()

    def reject(spec: Spec, say: object) -> None:
        raise SpecError(f"{spec.speculation.model}: cut off")

    monkeypatch.setattr(preflight, "check_model", reject)
    heads = ("--set", "speculation.method=eagle", "--set")
    assert update(*heads, "speculation.model=/heads", "--dry-run") == 2
    printed = capsys.readouterr()
    assert "/heads: cut off" in printed.err and "speculation.model" in printed.out
    assert update(*heads, "speculation.model=hf:org/heads", "--dry-run") == 0


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["--set", "router.http_port=9"], "router.http_port: cannot change while deployed"),
        (["--set", "name=b"], "name: the spec is named b, the deployment a"),
        (["--set", "decode.max_runing=9"], "did you mean max_running?"),
        (["--set", "decode.max_running=9", "--canary", "2"], "--canary 2: must be a share of the requests"),
        ([], "give a spec, --set PATH=VALUE"),
    ],
)
def test_invalid_update_is_one_line(
    controlled: Callable[..., FakeController], capsys: pytest.CaptureFixture[str], arguments: list[str], output: str
) -> None:
    fake = controlled()
    assert update(*arguments) == 2
    error = capsys.readouterr().err
    assert output in error and error.count("\n") == 1 and "update" not in fake.methods


def test_waits_for_the_end_and_fails_after_a_rollback(
    controlled: Callable[..., FakeController], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.cli.update.time.sleep", lambda seconds: None)
    controlled(("rolling", ""), ("", "revision 2 serves"))
    assert update("--restart") == 0
    assert "revision 2 serves, after" in capsys.readouterr().out
    controlled(("canary", ""), ("returning", ""), ("", "revision 2 was rolled back: it is slow"))
    assert update("--restart") == 2
    assert "cluster: revision 2 was rolled back: it is slow" in capsys.readouterr().err


def test_equal_spec_changes_nothing(
    controlled: Callable[..., FakeController], capsys: pytest.CaptureFixture[str]
) -> None:
    fake = controlled()
    assert update("--set", "decode.replicas=2") == 0
    assert capsys.readouterr().out == "nothing changes\n" and fake.methods == ["status"]
