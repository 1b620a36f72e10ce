"""What `cluster status` says of a deployment, to people."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cluster.cli.status import as_text

if TYPE_CHECKING:  # it brings Ray
    from cluster.host.status import DeploymentReport


@pytest.mark.parametrize("tls", ["auto", "files", "off"])
def test_it_says_when_the_processes_speak_in_clear(tls: str) -> None:
    report: DeploymentReport = {
        "name": "a",
        "ready": True,
        "endpoints": {"grpc": "127.0.0.1:50051", "http": "http://127.0.0.1:8000", "admin": []},
        "tls": tls,
        "pools": {},
    }
    assert ("security.tls is off" in as_text(report)) is (tls == "off")
