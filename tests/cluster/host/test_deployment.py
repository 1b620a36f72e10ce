"""A deployment whose operator has gone: nothing of it stays."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cluster.cli.app import run
from cluster.control.desired import Parts
from cluster.control.report import Pools
from cluster.host import deployment, local_ray
from cluster.host import state as states
from cluster.words.spec_file import parse_spec


class Deaf:
    """Implements cluster.host.reporter.Reporter, over a connection that has broken."""

    def say(self, line: str) -> None:
        raise BrokenPipeError

    def show(self, pools: Pools) -> None:
        raise BrokenPipeError


def test_what_was_started_is_removed_where_nobody_listens_any_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stopped: list[local_ray.LocalRay] = []
    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(deployment.preflight, "check_model", lambda spec, say: None)
    monkeypatch.setattr(local_ray, "stop", stopped.append)
    spec = parse_spec({"name": "a"})
    with pytest.raises(BrokenPipeError):
        deployment.deploy(
            spec, address=None, deadline=time.monotonic(), wait_for_nodes=False, parts=Parts(), reporter=Deaf()
        )
    assert stopped and states.load("a") is None


def test_a_deployment_that_was_removed_for_that_is_no_success(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def deploy(*arguments: object, **more: object) -> None:
        raise BrokenPipeError

    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(deployment, "deploy", deploy)
    assert run(["deploy", "1P1D"]) == 2
    assert "nobody reads this output any more; what was started is removed again" in capsys.readouterr().err
