"""TLS at both endpoints, including certificate replacement."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from starlette.responses import PlainTextResponse

from cluster.bench.endpoints import open_endpoint
from core.rpc import inference_pb2 as pb
from core.rpc.inference_pb2_grpc import InferenceStub
from core.spec.loader import parse_spec
from core.types.errors import DeployError, SpecError
from core.wire.client_access import EndpointAccess
from frontend.access.access import Access
from frontend.grpc.api import GrpcApi, open_grpc_api
from frontend.http.app import create_app
from frontend.http.connections import Certificates
from tests.frontend.access.keys import access_with, issue
from tests.frontend.http.certificate_files import CertificateFiles, write_certificate
from tests.support.event_loops import on_both_loops
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.tiny_service import MakeCompletions


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return write_certificate(tmp_path, name="first")


@asynccontextmanager
async def tls_endpoint(
    completions: MakeCompletions, files: CertificateFiles, access: Access | None = None
) -> AsyncIterator[GrpcApi]:
    target = await open_grpc_api(
        completions(FakeTokenService()),
        access=access or Access.anybody(),
        host="127.0.0.1",
        port=0,
        certificates=Certificates.of(files.certificate, files.key),
    )
    try:
        yield target
    finally:
        await target.close(grace_s=0)


async def list_models(port: int, files: CertificateFiles) -> list[str]:
    """Call over a new connection that trusts the current certificate file."""
    access = EndpointAccess(certificate=files.certificate, is_tls=True)
    async with access.channel(f"127.0.0.1:{port}") as channel:
        answer = await InferenceStub(channel).ListModels(pb.ListModelsRequest(), timeout=10)
    return [model.id for model in answer.models]


async def test_grpc_endpoint_accepts_tls_only(completions: MakeCompletions, files: CertificateFiles) -> None:
    async with tls_endpoint(completions, files) as target:
        async with tls_endpoint(completions, files) as other:  # several endpoints share one certificate
            access = EndpointAccess(certificate=files.certificate, is_tls=True)
            async with access.channel(f"127.0.0.1:{target.port},127.0.0.1:{other.port}") as channel:
                answer = await InferenceStub(channel).ListModels(pb.ListModelsRequest(), timeout=10)
        assert [model.id for model in answer.models] == ["tiny"]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{target.port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await InferenceStub(channel).ListModels(pb.ListModelsRequest(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_replaced_certificate_is_used_by_grpc(
    completions: MakeCompletions, files: CertificateFiles, tmp_path: Path
) -> None:
    async with tls_endpoint(completions, files) as target:
        access = EndpointAccess(certificate=files.certificate, is_tls=True)
        async with access.channel(f"127.0.0.1:{target.port}") as old:
            stub = InferenceStub(old)
            await stub.ListModels(pb.ListModelsRequest(), timeout=10)
            write_certificate(tmp_path, name="second")
            assert await list_models(target.port, files) == ["tiny"]
            await stub.ListModels(pb.ListModelsRequest(), timeout=10)  # existing connections are kept
        Path(files.key).write_text("half a key")
        assert await list_models(target.port, files) == ["tiny"]


@on_both_loops
async def test_replaced_certificate_is_used_by_http(files: CertificateFiles, tmp_path: Path) -> None:
    async with serve_http(PlainTextResponse("here"), certificates=Certificates(files.certificate, files.key)) as target:
        url = "https://{}:{}/".format(*target)

        async def ask() -> str:
            """Send over a new connection that trusts the current certificate file."""
            async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=files.certificate)) as client:
                return (await client.get(url)).text

        trusts_first = ssl.create_default_context(cafile=files.certificate)
        async with httpx.AsyncClient(verify=trusts_first) as old, httpx.AsyncClient(verify=trusts_first) as late:
            assert (await old.get(url)).text == "here"
            write_certificate(tmp_path, name="second")
            assert await ask() == "here"
            assert (await old.get(url)).text == "here", "existing connections are kept"
            with pytest.raises(httpx.ConnectError, match="certificate"):
                await late.get(url)
        Path(files.key).write_text("half a key")
        assert await ask() == "here"


async def test_load_generator_uses_both_endpoints_with_a_key(
    completions: MakeCompletions, files: CertificateFiles
) -> None:
    known = issue("acme")
    keys = access_with(known)
    access = EndpointAccess(api_key=known.secret, certificate=files.certificate)
    app = create_app(completions(FakeTokenService()), access=keys, is_healthy=lambda: True)
    async with (
        tls_endpoint(completions, files, keys) as target,
        serve_http(app, certificates=Certificates(files.certificate, files.key)) as (host, port),
    ):
        for endpoint in (f"grpcs://127.0.0.1:{target.port}", f"https://{host}:{port}"):
            async with open_endpoint(endpoint, access) as asking:
                items = [item async for item in asking.ask([100, 101], max_tokens=2, timeout_s=30)]
            assert sum(item for item in items if isinstance(item, int)) == 2
        async with httpx.AsyncClient(verify=ssl.create_default_context()) as pending_peer:
            with pytest.raises(httpx.ConnectError, match="certificate"):
                await pending_peer.get(f"https://{host}:{port}/health")
    assert known.secret not in repr(access)


def test_invalid_certificate_is_reported_in_one_line(files: CertificateFiles, tmp_path: Path) -> None:
    with pytest.raises(DeployError, match=r"router.tls_cert .*nowhere.pem"):
        Certificates(str(tmp_path / "nowhere.pem"), files.key)
    Path(files.key).write_text("no key")
    with pytest.raises(DeployError, match=r"router.tls_key"):
        Certificates(files.certificate, files.key)
    with pytest.raises(SpecError, match="tls_cert and tls_key: one needs the other"):
        parse_spec({"router": {"tls_cert": files.certificate}})
