"""Errors that cross a gRPC call keep their class and facts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio

from core.rpc import worker_pb2 as pb
from core.rpc import worker_pb2_grpc as rpc
from core.types import errors
from core.types.errors import ClusterError
from core.wire.call_errors import abort_with, error_of
from core.wire.channel import listen, make_server, open_channel
from tests.support.identities import in_clear, rank, router

_CALLER, _CALLEE = in_clear(router()), in_clear(rank("decode-0"))


class RefusingServicer(rpc.DecodeWorkerServicer):
    def __init__(self, error: ClusterError) -> None:
        self._error = error

    async def Generate(self, request: pb.GenerateRequest, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        await abort_with(context, self._error)
        yield  # makes this function a generator


@asynccontextmanager
async def refusing(error: ClusterError) -> AsyncIterator[rpc.DecodeWorkerStub]:
    server = make_server(_CALLEE)
    rpc.add_DecodeWorkerServicer_to_server(RefusingServicer(error), server)
    port = listen(server, "127.0.0.1:0", _CALLEE)
    await server.start()
    async with open_channel(f"127.0.0.1:{port}", peer=_CALLEE.name, identity=_CALLER) as channel:
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
    async with open_channel("127.0.0.1:1", peer=_CALLEE.name, identity=_CALLER) as channel:
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
