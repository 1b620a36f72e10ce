"""The worker's process of tests.benchmarks.mtls. See core.process.child_process."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from typing import Any

from grpc import aio

from core.identity.authority import Authority
from core.identity.credentials import Identity
from core.process.child_process import obey
from core.rpc import worker_pb2 as pb
from core.rpc import worker_pb2_grpc as rpc
from core.wire.rank_server import RankHost
from tests.benchmarks.mtls import ROUTER, WORKER
from tests.support.identities import DEPLOYMENT, proven, tls_credentials


class _EagerWorker(rpc.WorkerServicer, rpc.DecodeWorkerServicer):
    """Sends frames as fast as they are taken."""

    def __init__(self, streams: int) -> None:
        tokens = [pb.SampledToken(token_id=1000 + i) for i in range(streams)]
        self._streams = [pb.StreamTokens(stream=i, tokens=[token]) for i, token in enumerate(tokens)]

    async def Frames(self, request: pb.FramesRequest, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        number = 0
        while True:
            yield pb.Frame(number=number, streams=self._streams)
            number += 1

    async def Stop(self, request: pb.StopRequest, context: aio.ServicerContext[Any, Any]) -> pb.StopReply:
        return pb.StopReply()


class Worker:
    """Every public method is an order."""

    def __init__(self) -> None:
        self._authority = Authority.create(DEPLOYMENT)
        self._hosts: list[RankHost] = []

    def serve(self, streams: int) -> dict[str, str]:
        """Where it listens, by the way of asking."""
        servicer = _EagerWorker(streams)

        def register(server: aio.Server) -> None:
            rpc.add_WorkerServicer_to_server(servicer, server)
            rpc.add_DecodeWorkerServicer_to_server(servicer, server)

        identities = {"clear": Identity(WORKER, None), "mTLS": proven(self._authority, WORKER)}
        addresses = {}
        for way, identity in identities.items():
            self._hosts.append(RankHost("127.0.0.1", identity))
            addresses[way] = self._hosts[-1].serve(register)
        return addresses

    def tls_credentials(self) -> dict[str, Any]:
        """The router's; of this measurement, and of no use elsewhere."""
        made = tls_credentials(self._authority, ROUTER)
        own = made.certificate
        told: dict[str, Any] = {"chain": own.chain.decode(), "authorities": own.authorities.decode()}
        return told | {"key": made.key.decode(), "life_s": own.life_s}

    def processor_s(self) -> float:
        return time.process_time()


if __name__ == "__main__":
    obey(Worker)
    os._exit(0)
