"""Authorization at a rank's port, and of a rank by its caller, with real handshakes and calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message
from grpc import aio

from core.identity.authority import Authority
from core.identity.credentials import Identity
from core.identity.process_name import ProcessName
from core.identity.rules import RULES
from core.rpc import transfer_pb2 as transfer
from core.rpc import worker_pb2 as worker
from core.spec.schema import SecuritySpec
from core.wire.channel import listen, make_server, open_channel
from tests.core.identity.authorities import issue_authority
from tests.core.wire.every_rpc import METHODS, FakeServices, call, truthful
from tests.support.identities import DEPLOYMENT, in_clear, proven, rank, router, tls_credentials

_OURS, _THEIRS = Authority.create(DEPLOYMENT), Authority.create(DEPLOYMENT)
_CALLEE = rank("decode-0", 1)
_ROUTER, _LEADER, _SIBLING = router(), rank("decode-0", 0), rank("decode-0", 2)
_OTHER_LEADER, _OTHER = rank("prefill-0", 0), rank("prefill-0", 1)
_EVERYBODY = [_ROUTER, _LEADER, _SIBLING, _OTHER_LEADER, _OTHER]

# An independent copy of the rules: change both.
_MAY = {
    "Prefill": [_ROUTER],
    "Generate": [_ROUTER],
    "Stop": [_ROUTER],
    "Migrate": [_ROUTER],
    "Fetch": [_OTHER_LEADER],
    "Connect": [_OTHER_LEADER, _OTHER],
    "Open": [_LEADER],
    "Close": [_LEADER],
    "Report": [_LEADER, _SIBLING],
    "Tell": [_LEADER, _SIBLING, _OTHER_LEADER, _OTHER],
    "Ask": [_LEADER, _SIBLING, _OTHER_LEADER, _OTHER],
}


@asynccontextmanager
async def _serving(identity: Identity) -> AsyncIterator[tuple[str, FakeServices]]:
    services, server = FakeServices(), make_server(identity)
    services.register(server)
    port = listen(server, "127.0.0.1:0", identity)
    await server.start()
    yield f"127.0.0.1:{port}", services
    await server.stop(None)


def _channel(address: str, identity: Identity, peer: ProcessName = _CALLEE) -> aio.Channel:
    return open_channel(address, peer=peer, identity=identity)


def test_rules_cover_exactly_the_existing_rpcs() -> None:
    assert set(RULES) == set(METHODS)
    assert {method.name for method in METHODS.values()} == set(_MAY)


async def test_each_rpc_accepts_only_its_callers() -> None:
    async with _serving(proven(_OURS, _CALLEE)) as (address, services):
        for caller in _EVERYBODY:
            async with _channel(address, proven(_OURS, caller)) as channel:
                for name, method in METHODS.items():
                    before = services.served[name]
                    status = await call(channel, name, truthful(name, caller, _CALLEE))
                    may = caller in _MAY[method.name]
                    assert status is (grpc.StatusCode.OK if may else grpc.StatusCode.PERMISSION_DENIED), (caller, name)
                    assert services.served[name] - before == may


_LIES: list[tuple[ProcessName, str, Message]] = [
    (_ROUTER, "/cluster.worker.v1.DecodeWorker/Generate", worker.GenerateRequest(router="router-1")),
    (_ROUTER, "/cluster.worker.v1.DecodeWorker/Stop", worker.StopRequest(router="router-1")),
    (_ROUTER, "/cluster.worker.v1.DecodeWorker/Migrate", worker.MigrateRequest()),
    (_OTHER_LEADER, "/cluster.worker.v1.PrefixFetch/Fetch",
     worker.FetchRequest(handoff=worker.Handoff(replica="prefill-1"))),
    (_OTHER, "/cluster.transfer.v1.Rank/Connect", transfer.SenderFrame(hello=transfer.Hello(sender="prefill-0/0"))),
    (_OTHER, "/cluster.transfer.v1.Rank/Connect", transfer.SenderFrame(hello=transfer.Hello(sender="prefill-0/1",
     sender_rank=0))),
    (_SIBLING, "/cluster.transfer.v1.Rank/Report", transfer.ReportRequest(rank=1)),
    (_OTHER, "/cluster.transfer.v1.Rank/Tell", transfer.TellRequest(key="gang/0")),
    (_OTHER, "/cluster.transfer.v1.Rank/Ask", transfer.AskRequest(key="prefill-0/0>1#1/f00/place")),
]  # fmt: skip


@pytest.mark.parametrize(("caller", "name", "message"), _LIES, ids=[name.rpartition("/")[2] for _, name, _ in _LIES])
async def test_message_must_match_the_callers_certificate(caller: ProcessName, name: str, message: Message) -> None:
    async with _serving(proven(_OURS, _CALLEE)) as (address, services):
        async with _channel(address, proven(_OURS, caller)) as channel:
            assert await call(channel, name, message) is grpc.StatusCode.PERMISSION_DENIED
        assert not services.served


async def test_silent_stream_is_rejected_with_a_reason() -> None:
    async with _serving(proven(_OURS, _CALLEE)) as (address, services):
        async with _channel(address, proven(_OURS, _OTHER)) as channel:
            silent = channel.stream_stream("/cluster.transfer.v1.Rank/Connect")(iter(()), timeout=10)
            with pytest.raises(aio.AioRpcError) as failed:
                await anext(aiter(silent))
        assert failed.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert failed.value.details() == "the call ended before its first message, which names its owner"
        assert not services.served


async def test_rpc_without_a_rule_is_rejected() -> None:
    async with _serving(proven(_OURS, _CALLEE)) as (address, _):
        async with _channel(address, proven(_OURS, _ROUTER)) as channel:
            with pytest.raises(aio.AioRpcError) as failed:
                await channel.unary_unary("/cluster.worker.v1.Worker/Shutdown")(b"", timeout=10)
    assert failed.value.code() is grpc.StatusCode.PERMISSION_DENIED


def _unauthenticated_channels(address: str) -> dict[str, aio.Channel]:
    """Return channels that can connect, but have no valid certificate."""
    authorities = tls_credentials(_OURS, _ROUTER).certificate.authorities
    anonymous = grpc.ssl_channel_credentials(authorities)
    theirs = tls_credentials(_THEIRS, _ROUTER)
    forged = grpc.ssl_channel_credentials(authorities, theirs.key, theirs.certificate.chain)
    name = [("grpc.ssl_target_name_override", _CALLEE.host)]
    return {
        "in clear": aio.insecure_channel(address),
        "without a certificate": aio.secure_channel(address, anonymous, options=name),
        "of another deployment, alike in name": aio.secure_channel(address, forged, options=name),
        "expired": _channel(address, proven(_OURS, _ROUTER, life_s=-1.0)),
    }


async def test_caller_without_our_certificate_is_rejected_by_every_rpc() -> None:
    async with _serving(proven(_OURS, _CALLEE)) as (address, services):
        for kind, unauthenticated in _unauthenticated_channels(address).items():
            async with unauthenticated as channel:
                for name in METHODS:
                    status = await call(channel, name, truthful(name, _ROUTER, _CALLEE))
                    assert status is grpc.StatusCode.UNAVAILABLE, (kind, name)
        assert not services.served
        async with _channel(address, proven(_OURS, _ROUTER)) as channel:  # the server itself works
            generate = "/cluster.worker.v1.DecodeWorker/Generate"
            assert await call(channel, generate, truthful(generate, _ROUTER, _CALLEE)) is grpc.StatusCode.OK


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"], ids=["nothing", "half a word"])
async def test_connection_without_a_handshake_blocks_nothing(sent: bytes) -> None:
    """gRPC's default timeout is two minutes."""
    async with _serving(proven(_OURS, _CALLEE)) as (address, _):
        reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))
        writer.write(sent)
        with suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 50)
        writer.close()


async def test_other_deployment_of_the_same_authority_is_rejected() -> None:
    """An operator's authority may serve several deployments."""
    generate, neighbour = "/cluster.worker.v1.DecodeWorker/Generate", router(deployment="neighbour")
    async with _serving(proven(_OURS, _CALLEE)) as (address, services):
        async with _channel(address, proven(_OURS, neighbour)) as channel:
            message = truthful(generate, neighbour, _CALLEE)
            assert await call(channel, generate, message) is grpc.StatusCode.PERMISSION_DENIED
        assert not services.served


async def test_operators_authority_is_accepted(tmp_path: Path) -> None:
    """An intermediate authority: processes present its certificate and trust only the root."""
    root = issue_authority("the operator's root")
    certificate, key = issue_authority("for xpyd", root).write(tmp_path, "own")
    authority = Authority.from_files(
        SecuritySpec(tls="files", ca=root.write(tmp_path, "root")[0], certificate=certificate, key=key)
    )
    generate = "/cluster.worker.v1.DecodeWorker/Generate"
    async with _serving(proven(authority, _CALLEE)) as (address, _):
        for identity, status in (
            (proven(authority, _ROUTER), grpc.StatusCode.OK),
            (proven(_OURS, _ROUTER), grpc.StatusCode.UNAVAILABLE),
        ):
            async with _channel(address, identity) as channel:
                assert await call(channel, generate, truthful(generate, _ROUTER, _CALLEE)) is status


@pytest.mark.parametrize(
    "impostor",
    [
        proven(_OURS, rank("decode-1", 1)),
        proven(_OURS, rank("decode-0", 0)),
        proven(_OURS, rank("decode-0", 1, deployment="neighbour")),
        proven(_THEIRS, _CALLEE),
        proven(_OURS, _CALLEE, life_s=-1.0),
        in_clear(_CALLEE),
    ],
    ids=["another replica", "another rank", "another deployment", "another authority", "expired", "in clear"],
)
async def test_caller_accepts_only_the_expected_peer(impostor: Identity) -> None:
    """A process that took over an address, or intercepts connections, gets no request."""
    generate = "/cluster.worker.v1.DecodeWorker/Generate"
    async with _serving(impostor) as (address, services):
        async with _channel(address, proven(_OURS, _ROUTER)) as channel:
            message = truthful(generate, _ROUTER, _CALLEE)
            assert await call(channel, generate, message) is grpc.StatusCode.UNAVAILABLE
        assert not services.served
