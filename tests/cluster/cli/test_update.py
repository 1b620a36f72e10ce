"""`cluster update`: dry runs, and outcomes of updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cluster.launch import preflight
from core.spec.loader import parse_spec
from core.spec.schema import Spec
from core.types.errors import SpecError
from tests.cluster.cli.command import CommandInProcess, Outcome
from tests.cluster.cli.conftest import Control

SPEC = parse_spec({"name": "a", "decode": {"replicas": 2}}).model_dump(mode="json")
REPLICA = {"state": "ready", "node": "", "stage": "", "fraction": 0.0}
POOLS = {role: {"replicas": [{"id": f"{role}-0", **REPLICA}], "failures": []} for role in ("prefill", "decode")}


@pytest.fixture
def controlled(control: Control, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """controlled((phase, text of the last update), …): statuses after the update began; "": it has ended.

    Returns the methods called.
    """

    def make(*steps: tuple[str, str]) -> list[str]:
        left = list(steps)

        def answer(method: str, *args: Any) -> Any:
            if method != "status":
                return True
            phase, last = left.pop(0) if "update" in methods else ("", "")
            update = {"revision": 2, "phase": phase, "reason": "it is slow", "step": "1 of 2", "share": 0.5}
            report = {"number": 1, "update": update if phase else None, "last_update": last}
            return {"spec": SPEC, "pools": POOLS, "revision": report}

        methods = control(answer)
        return methods

    monkeypatch.setattr(preflight, "check_model", lambda spec, say: None)
    monkeypatch.setattr("cluster.cli.update.time.sleep", lambda seconds: None)
    return make


@pytest.fixture
def update(cluster: CommandInProcess) -> Callable[..., Outcome]:
    return lambda *arguments: cluster.run("update", *arguments)


Update = Callable[..., Outcome]


def test_dry_run_prints_changes_and_requests_nothing(controlled: Callable[..., list[str]], update: Update) -> None:
    methods = controlled()
    dry = update("--set", "decode.max_running=32", "--set", "timeouts.drain_s=9", "--dry-run")
    assert dry.code == 0 and "decode.max_running: 64 -> 32    new decode replicas" in dry.out
    assert "prefill: prefill-0 kept" in dry.out and "decode: decode-0 replaced" in dry.out
    assert "an update cannot do this" in update("--set", "router.http_port=9", "--dry-run").out
    equal = update("--set", "decode.replicas=2")
    assert (equal.code, equal.out) == (0, "nothing changes\n")
    assert methods == ["status"] * 3


def test_dry_run_checks_local_sources(
    controlled: Callable[..., list[str]], update: Update, monkeypatch: pytest.MonkeyPatch
) -> None:
    controlled()

    def reject(spec: Spec, say: object) -> None:
        raise SpecError(f"{spec.speculation.model}: cut off")

    monkeypatch.setattr(preflight, "check_model", reject)
    heads = ("--dry-run", "--set", "speculation.method=eagle", "--set")
    local = update(*heads, "speculation.model=/heads")
    assert local.code == 2 and "/heads: cut off" in local.err and "speculation.model" in local.out
    assert update(*heads, "speculation.model=hf:org/heads").code == 0


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
    controlled: Callable[..., list[str]], update: Update, arguments: list[str], output: str
) -> None:
    methods, failed = controlled(), update(*arguments)
    assert failed.code == 2 and output in failed.err and failed.err.count("\n") == 1 and "update" not in methods


@pytest.mark.parametrize(
    ("phases", "last", "code"),
    [(["rolling"], "revision 2 serves", 0), (["canary", "returning"], "revision 2 was rolled back: it is slow", 2)],
)
def test_waits_for_the_end_and_fails_after_a_rollback(
    controlled: Callable[..., list[str]], update: Update, phases: list[str], last: str, code: int
) -> None:
    controlled(*((phase, "") for phase in phases), ("", last))
    ended = update("--restart")
    assert ended.code == code and (f"{last}, after" in ended.out if code == 0 else f"cluster: {last}" in ended.err)
