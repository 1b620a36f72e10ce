"""Text and exit code of `cluster status`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cluster.cli.app import run
from cluster.cli.status import as_text
from core.types.errors import DeployError, NotDeployed

# Imports Ray.
if TYPE_CHECKING:
    from cluster.launch.status import DeploymentReport


@pytest.mark.parametrize("tls", ["auto", "files", "off"])
def test_unencrypted_deployment_is_reported(tls: str) -> None:
    report: DeploymentReport = {
        "name": "a",
        "ready": True,
        "endpoints": {"grpc": "127.0.0.1:50051", "http": "http://127.0.0.1:8000", "admin": []},
        "tls": tls,
        "pools": {},
    }
    assert ("security.tls is off" in as_text(report)) is (tls == "off")


@pytest.mark.parametrize(("error", "code"), [(DeployError("no Ray answers"), 1), (NotDeployed("nothing"), 3)])
def test_exit_code(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find_state(name: str | None) -> None:
        raise error

    monkeypatch.setattr("cluster.cli.status.find_state", find_state)
    assert run(["status"]) == code
    assert capsys.readouterr().err == f"cluster: {error}\n"
