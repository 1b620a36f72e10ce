"""The decode worker of tests.benchmarks.router_costs, in a process of its own: it speaks the real protocol, and
computes nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

from grpc import aio

from cluster.process.ordered_process import obey
from cluster.rpc import worker_pb2 as pb
from cluster.rpc import worker_pb2_grpc as rpc
from cluster.wire.frames import FrameHub, WorkerServicer
from cluster.wire.rank_host import RankHost
from cluster.words.papers import Identity
from tests.identities import rank

NAME = rank("decode-0")


class _PacedWorker(rpc.DecodeWorkerServicer):
    """Every step brings one token to each choice that runs."""

    def __init__(self, hub: FrameHub) -> None:
        self.step_s = 0.02
        self._hub = hub
        self._left: dict[int, tuple[int, int, asyncio.Event]] = {}  # stream: tokens to come, the last token, its end
        self._stepping = asyncio.ensure_future(self._step_for_ever())
        hub.publish({}, pb.Status(replica="decode-0", blocks_total=1 << 20, blocks_free=1 << 20))

    async def Generate(
        self, request: pb.GenerateRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateEvent]:
        yield pb.GenerateEvent(reserved=pb.Reserved())
        sequence, ended = request.sequence, asyncio.Event()
        self._left[sequence.stream] = sequence.sampling.max_tokens, sequence.token_ids[-1], ended
        yield pb.GenerateEvent(started=pb.Started(num_tokens=len(sequence.token_ids)))
        await ended.wait()
        yield pb.GenerateEvent(finished=pb.Finished())

    async def _step_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self.step_s, loop.time())
            await asyncio.sleep(due - loop.time())
            self._hub.publish({"router-0": [self._next(stream) for stream in list(self._left)]})

    def _next(self, stream: int) -> pb.StreamTokens:
        left, last, ended = self._left[stream]
        token = pb.SampledToken(token_id=65 + (last + left) % 26)
        if left == 1:
            del self._left[stream]
            token.finish_reason = "length"
            ended.set()
        else:
            self._left[stream] = left - 1, last, ended
        return pb.StreamTokens(stream=stream, tokens=[token])


class Worker:
    """Every public method is an order."""

    def __init__(self) -> None:
        self._host = RankHost("127.0.0.1", Identity(NAME, None))

    def serve(self) -> str:
        return self._host.serve(self._register)

    def set_step(self, seconds: float) -> None:
        self._worker.step_s = seconds

    def _register(self, server: aio.Server) -> None:
        hub = FrameHub()
        self._worker = _PacedWorker(hub)
        rpc.add_WorkerServicer_to_server(WorkerServicer(hub), server)
        rpc.add_DecodeWorkerServicer_to_server(self._worker, server)


if __name__ == "__main__":
    obey(Worker)
    os._exit(0)
