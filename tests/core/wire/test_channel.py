"""Calls between processes: errors keep their class, certificates are renewed, handshakes crash nothing."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import repeat
from typing import Any

import grpc
import pytest
from grpc import aio

from core.identity.authority import Authority
from core.identity.credentials import Identity
from core.rpc import worker_pb2 as pb
from core.rpc import worker_pb2_grpc as rpc
from core.types import errors
from core.types.errors import ClusterError
from core.wire.call_errors import abort_with, error_of
from core.wire.channel import LastingChannel, listen, make_server, open_channel, open_lasting_channel
from tests.support.identities import DEPLOYMENT, in_clear, proven, rank, router, tls_credentials
from tests.support.waiting import becomes

_CALLEE, _CALLER = rank("decode-0"), router()


class RefusingServicer(rpc.DecodeWorkerServicer):
    def __init__(self, error: ClusterError) -> None:
        self._error = error

    async def Generate(self, request: pb.GenerateRequest, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        await abort_with(context, self._error)
        yield  # makes this function a generator


@asynccontextmanager
async def refusing(error: ClusterError) -> AsyncIterator[rpc.DecodeWorkerStub]:
    server = make_server(in_clear(_CALLEE))
    rpc.add_DecodeWorkerServicer_to_server(RefusingServicer(error), server)
    port = listen(server, "127.0.0.1:0", in_clear(_CALLEE))
    await server.start()
    async with open_channel(f"127.0.0.1:{port}", peer=_CALLEE, identity=in_clear(_CALLER)) as channel:
        yield rpc.DecodeWorkerStub(channel)
    await server.stop(None)


@pytest.mark.parametrize(
    "error",
    [
        errors.CapacityError("the queue is full", retry_after_s=2.5),
        errors.RequestError("no such thing", param="stop"),
        errors.ContextLengthExceeded("too long", param="messages"),
        errors.RequestError("wrong as a whole"),
        errors.HandoffExpired("epoch 1 is fenced"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_error_round_trips_through_a_call(error: ClusterError) -> None:
    async with refusing(error) as worker:
        with pytest.raises(aio.AioRpcError) as failed:
            await worker.Generate(pb.GenerateRequest(router="r")).read()
    back = error_of(failed.value, peer="decode-0")
    assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))


async def test_unreachable_peer_is_replica_lost() -> None:
    async with open_channel("127.0.0.1:1", peer=_CALLEE, identity=in_clear(_CALLER)) as channel:
        with pytest.raises(aio.AioRpcError) as failed:
            await rpc.DecodeWorkerStub(channel).Generate(pb.GenerateRequest(router="r")).read()
    back = error_of(failed.value, peer="decode-0")
    assert type(back) is errors.ReplicaLost and str(back).startswith("decode-0: UNAVAILABLE")


@pytest.mark.parametrize(
    "facts",
    [
        {"cluster-error": "CapacityError", "cluster-error-retry-after-s": "soon"},
        {"cluster-error": "CapacityError", "cluster-error-retry-after-s": "nan"},
        {"cluster-error": "CapacityError", "cluster-error-retry-after-s": "inf"},
        {"cluster-error": "ReplicaDidNotStart"},
        {"cluster-error": "annotations"},
    ],
)
def test_malformed_error_is_replica_lost(facts: dict[str, str]) -> None:
    failed = aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(*facts.items()), details="what?")
    assert isinstance(error_of(failed, peer="decode-0"), errors.ReplicaLost)


_REQUEST = pb.GenerateRequest(router=_CALLER.router)


class CountingServicer(rpc.DecodeWorkerServicer):
    """Servicer that sends an event on demand and records the certificate of each call."""

    def __init__(self) -> None:
        self.go = asyncio.Semaphore(0)
        self.certificates: list[bytes] = []
        self.num_open = 0

    async def Generate(self, request: pb.GenerateRequest, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        self._note(context)
        self.num_open += 1
        number = 0
        try:
            while True:
                await self.go.acquire()
                yield pb.GenerateEvent(finished=pb.Finished(frames=number))
                number += 1
        finally:
            self.num_open -= 1

    async def Stop(self, request: pb.StopRequest, context: aio.ServicerContext[Any, Any]) -> pb.StopReply:
        self._note(context)
        return pb.StopReply()

    def _note(self, context: aio.ServicerContext[Any, Any]) -> None:
        self.certificates.append(context.auth_context()["x509_pem_cert"][0].strip())


@asynccontextmanager
async def _serving(identity: Identity) -> AsyncIterator[tuple[str, CountingServicer]]:
    servicer, server = CountingServicer(), make_server(identity)
    rpc.add_DecodeWorkerServicer_to_server(servicer, server)
    port = listen(server, "127.0.0.1:0", identity)
    await server.start()
    yield f"127.0.0.1:{port}", servicer
    await server.stop(None)


@asynccontextmanager
async def _closing(channel: LastingChannel) -> AsyncIterator[LastingChannel]:
    yield channel
    await channel.close()


async def _number(servicer: CountingServicer, events: Any) -> int:
    servicer.go.release()
    return int((await asyncio.wait_for(events.read(), 10)).finished.frames)


async def test_stream_survives_renewals_of_both_ends() -> None:
    authority = Authority.create(DEPLOYMENT)
    server, client = proven(authority, _CALLEE), proven(authority, _CALLER)
    async with _serving(server) as (address, servicer):
        async with _closing(open_lasting_channel(address, peer=_CALLEE, identity=client)) as channel:
            decode = rpc.DecodeWorkerStub(channel)
            events = decode.Generate(_REQUEST)
            assert await _number(servicer, events) == 0
            stop = pb.StopRequest(router=_CALLER.router)
            for turn in range(1, 4):
                server.renew(tls_credentials(authority, _CALLEE))
                client.renew(tls_credentials(authority, _CALLER))
                await decode.Stop(stop, timeout=10)
                assert await _number(servicer, events) == turn
                assert client.tls_credentials
                assert servicer.certificates[-1] == client.tls_credentials.certificate.chain.strip(), (
                    "the call uses the old certificate"
                )
            assert len(set(servicer.certificates)) == 4


async def test_renewed_server_uses_its_new_certificate_and_roots() -> None:
    """The authority changes, too: callers of the old one cannot connect any more, callers of the new one can."""
    before, after = Authority.create(DEPLOYMENT), Authority.create(DEPLOYMENT)
    server = proven(before, _CALLEE)
    async with _serving(server) as (address, servicer):
        async with open_channel(address, peer=_CALLEE, identity=proven(before, _CALLER)) as channel:
            events = rpc.DecodeWorkerStub(channel).Generate(_REQUEST)
            assert await _number(servicer, events) == 0
            server.renew(tls_credentials(after, _CALLEE))
            for authority, status in ((before, grpc.StatusCode.UNAVAILABLE), (after, grpc.StatusCode.OK)):
                async with open_channel(address, peer=_CALLEE, identity=proven(authority, _CALLER)) as another:
                    assert await _status(another) is status
            assert await _number(servicer, events) == 1, "the open stream continues"


async def test_old_connection_closes_with_its_last_call() -> None:
    authority = Authority.create(DEPLOYMENT)
    client = proven(authority, _CALLER)
    async with _serving(proven(authority, _CALLEE)) as (address, servicer):
        opened: list[aio.Channel] = []

        def open_one() -> aio.Channel:
            opened.append(open_channel(address, peer=_CALLEE, identity=client))
            return opened[-1]

        async with _closing(LastingChannel(open_one, client)) as channel:
            events = rpc.DecodeWorkerStub(channel).Generate(_REQUEST)
            assert await _number(servicer, events) == 0
            client.renew(tls_credentials(authority, _CALLER))
            assert await _status(channel) is grpc.StatusCode.OK
            assert not events.done()
            events.cancel()
            await becomes(lambda: opened[0].get_state() is grpc.ChannelConnectivity.SHUTDOWN)
            client.renew(tls_credentials(authority, _CALLER))  # without running calls the old connection closes at once
            assert await _status(channel) is grpc.StatusCode.OK
            await becomes(lambda: opened[1].get_state() is grpc.ChannelConnectivity.SHUTDOWN)
            assert len(opened) == 3 and opened[2].get_state() is grpc.ChannelConnectivity.READY


async def test_close_cancels_running_calls() -> None:
    authority = Authority.create(DEPLOYMENT)
    client = proven(authority, _CALLER)
    async with _serving(proven(authority, _CALLEE)) as (address, servicer):
        async with _closing(open_lasting_channel(address, peer=_CALLEE, identity=client)) as channel:
            old = rpc.DecodeWorkerStub(channel).Generate(_REQUEST)
            assert await _number(servicer, old) == 0
            client.renew(tls_credentials(authority, _CALLER))
            new = rpc.DecodeWorkerStub(channel).Generate(_REQUEST)
            await becomes(lambda: servicer.num_open == 2)
        assert old.done() and new.done()


async def _status(channel: Any) -> grpc.StatusCode:
    try:
        await rpc.DecodeWorkerStub(channel).Stop(pb.StopRequest(router=_CALLER.router), timeout=10)
    except aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


_AT_A_TIME = 32
_CONNECTIONS = 3000  # some hundred crashed it


def test_concurrent_aborted_handshakes_do_not_crash_the_server() -> None:
    """At a rank's port, where a connection starts a handshake."""
    command = [sys.executable, "-m", "tests.core.wire.handshake_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdin and server.stdout
        port = int(server.stdout.readline())
        with ThreadPoolExecutor(_AT_A_TIME) as threads:
            assert all(threads.map(_connect, repeat(port, _CONNECTIONS)))
        server.stdin.close()
        assert server.wait() == 0


def _connect(port: int) -> bool:
    """Connect and disconnect. Returns False if the connection was refused."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
    except ConnectionRefusedError:
        return False
    return True
