"""The commands of people with certificates, against a real port; and `cluster operators`, with a real Ray."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cluster.cli.app import run
from cluster.launch.person_file import CERTIFICATE
from core.identity.operator_account import PersonRole
from core.process.ports import free_port
from tests.cluster.cli.command import ClusterCommand
from tests.cluster.control.operating import Operating, operating


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Operating]:
    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("CLUSTER_ADDRESS", "")
    monkeypatch.setenv(CERTIFICATE, "")  # which a command sets, for itself
    monkeypatch.delattr(os, "execvp")  # it would be the end of these tests
    async with operating(tmp_path, monkeypatch) as found:
        yield found


async def test_a_person_sees_and_does_what_the_role_allows(
    served: Operating, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {role: tmp_path / f"{role}.json" for role in PersonRole}
    for role, file in files.items():
        served.person(f"some-{role}", role).save(file)

    async def said(role: PersonRole, *arguments: str) -> tuple[int, str]:
        code = await asyncio.to_thread(run, ["--as", str(files[role]), *arguments])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    for role in PersonRole:
        code, text = await said(role, "status")
        assert code == 0 and "operated is ready: prefill 1/1 decode 1/1, as the controller sees it" in text
        code, text = await said(role, "status", "--json")
        assert json.loads(text)["ready"] and json.loads(text)["tls"] == "auto" and "s3cret" not in text
        assert await said(role, "logs", "decode-0", "--lines", "3") == (0, "0| decode-0 3 None\n")
    code, text = await said(PersonRole.OPERATOR, "scale", "decode=3")
    assert code == 0 and "scaled decode 1 -> 3" in text
    code, text = await said(PersonRole.OPERATOR, "keys", "create", "acme")
    assert code == 0 and "sk-" in text and [key.name for key in served.controller.book.keys] == ["acme"]
    before = list(served.controller.asked)
    for arguments in (["scale", "decode=1"], ["drain", "decode-0"], ["keys", "list"], ["keys", "revoke", "acme"]):
        code, text = await said(PersonRole.VIEWER, *arguments)
        assert code == 2 and "only an operator may call this; viewer/some-viewer is a viewer" in text, arguments
    for arguments in (["down"], ["operators", "list"], ["explain", "r"]):
        code, text = await said(PersonRole.OPERATOR, *arguments)
        assert code == 2 and "by that certificate there are status, logs, scale, switch, drain and keys" in text, (
            arguments
        )
    code, text = await said(PersonRole.VIEWER, "--address", "root@head", "scale", "decode=1")
    assert code == 2 and "give one" in text, "or it would be root's command there"
    assert served.controller.asked == before
    noted = [json.loads(line) for line in (tmp_path / "state" / "commands.jsonl").read_text().splitlines()]
    assert noted[0]["command"][-2:] == ["scale", "decode=3"]
    assert noted[0]["certificate"] == str(files[PersonRole.OPERATOR])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterCommand]:
    command = ClusterCommand(tmp_path / "state")
    yield command
    command.run("down")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_people_from_deploy_to_revoke(cluster: ClusterCommand, tmp_path: Path) -> None:
    """On a real Ray, whose token the person's machine does not have: its state directory is another."""
    endpoints = ["--grpc-port", str(free_port()), "--http-port", str(free_port())]
    place = ["--set", f"security.operators=127.0.0.1:{free_port()}"]
    deployed = cluster.run("deploy", "1P1D", "--name", "peopled", *endpoints, *place, is_fake=True)
    assert deployed.code == 0, deployed.err
    files = {role: tmp_path / f"{role}.json" for role in PersonRole}
    for role, file in files.items():
        made = cluster.run("operators", "create", f"some-{role}", "--role", role, "--out", str(file))
        assert made.code == 0 and f"by {file}" in made.out, made.err
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    listed = json.loads(cluster.run("operators", "list", "--json").out)
    assert [(one["name"], one["role"]) for one in listed] == [(f"some-{role}", role) for role in PersonRole]
    assert "PRIVATE" not in json.dumps(listed)

    theirs = ClusterCommand(tmp_path / "theirs")
    viewer, operator = (["--as", str(files[role])] for role in PersonRole)
    assert "nothing is deployed" in theirs.run("status").err
    for who in (viewer, operator):
        assert theirs.run(*who, "status").code == 0
        assert "loading with 1 ranks" in theirs.run(*who, "logs", "decode-0").out
    rejected = theirs.run(*viewer, "scale", "decode=2")
    assert rejected.code == 2 and "only an operator may call this" in rejected.err
    scaled = theirs.run(*operator, "scale", "decode=2")
    assert scaled.code == 0 and "decode 1 -> 2" in scaled.out, scaled.err

    assert cluster.run("operators", "revoke", "some-operator").code == 0
    rejected = theirs.run(*operator, "scale", "decode=1")
    assert rejected.code == 2 and "no longer, let in" in rejected.err
    audit_log = tmp_path / "state" / "peopled" / "audit_log" / "commands.jsonl"
    [line] = [json.loads(line) for line in audit_log.read_text().splitlines()]
    assert (line["who"], line["command"], line["asked"]) == (
        "operator/some-operator",
        "Scale",
        {"replicas": {"decode": 2}},
    )
