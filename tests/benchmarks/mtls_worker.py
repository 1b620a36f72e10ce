"""The worker's process of tests.benchmarks.mtls. See core.process.child_process."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from typing import Any

from grpc import aio

from core.identity.authority import Authority
from core.identity.credentials import Identity
from core.process.child_process import obey
from core.rpc import worker_pb2 as pb
from core.rpc import worker_pb2_grpc as rpc
from core.wire.frames import FrameHub
from core.wire.rank_server import RankHost
from tests.benchmarks.mtls import ROUTER, WORKER
from tests.support.identities import DEPLOYMENT, proven, tls_credentials


class _EagerHub(FrameHub):
    """Sends frames as fast as they are taken."""

    def __init__(self, streams: int) -> None:
        super().__init__()
        tokens = [pb.SampledToken(token_id=1000 + i) for i in range(streams)]
        self._streams = [pb.StreamTokens(stream=i, tokens=[token]) for i, token in enumerate(tokens)]

    async def frames(self, router: str) -> AsyncGenerator[pb.Frame, None]:
        number = 0
        while True:
            yield pb.Frame(number=number, streams=self._streams)
            number += 1
            await asyncio.sleep(0)


class _Decode(rpc.DecodeWorkerServicer):
    async def Stop(self, request: pb.StopRequest, context: aio.ServicerContext[Any, Any]) -> pb.StopReply:
        return pb.StopReply()


class Worker:
    """Every public method is an order."""

    def __init__(self) -> None:
        self._authority = Authority.create(DEPLOYMENT)
        self._hosts: list[RankHost] = []

    def serve(self, streams: int) -> dict[str, tuple[str, str]]:
        """Return where it listens, for gRPC and for frames, by the way of asking."""

        def register(server: aio.Server) -> None:
            rpc.add_DecodeWorkerServicer_to_server(_Decode(), server)

        identities = {"clear": Identity(WORKER, None), "mTLS": proven(self._authority, WORKER)}
        addresses = {}
        for way, identity in identities.items():
            self._hosts.append(RankHost("127.0.0.1", identity))
            host = self._hosts[-1]
            addresses[way] = host.serve(register), host.serve_frames(_EagerHub(streams))
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
