"""Decode replicas of `python -m benchmarks router`, in a process of their own: the real protocol, no computation."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from grpc import aio

from core.identity.credentials import Identity
from core.identity.process_name import ProcessName
from core.process.child_process import obey
from core.rpc import worker_pb2 as pb
from core.rpc import worker_pb2_grpc as rpc
from core.types.request import FinishReason, SampledToken
from core.wire.frames import STATUS_S, FrameHub, StreamToken
from core.wire.rank_server import RankHost

ROUTER = "router-0"
NUM_BLOCKS = 1 << 20
_FIRST, _NUM_IDS = 65, 26  # the ids that it says, one after the other


class PacedWorker(rpc.DecodeWorkerServicer):
    """Every step brings one token to each choice that runs, as long as the loop keeps up."""

    def __init__(self, replica: str, hub: FrameHub) -> None:
        self.step_s = 0.02
        self.num_tokens = 0
        self.latest_s = 0.0  # by which a step has come too late
        self._hub = hub
        self._left: dict[int, tuple[int, int, asyncio.Event]] = {}  # stream: tokens to come, the last token, its end
        self._stepping = asyncio.ensure_future(self._step_for_ever())
        self._told = pb.Status(replica=replica, blocks_total=NUM_BLOCKS, blocks_free=NUM_BLOCKS)
        self._told_at = 0.0
        hub.publish({}, self._told)

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
            self.latest_s = max(self.latest_s, loop.time() - due)
            if self._left:
                tokens = {ROUTER: [self._next(stream) for stream in list(self._left)]}
                self._hub.publish(tokens, self._status(loop.time()))

    def _status(self, now: float) -> pb.Status | None:
        """Nothing where it has been told lately, as a replica does."""
        running = len(self._left)
        if running == self._told.running and now < self._told_at + STATUS_S:
            return None
        told, self._told_at = pb.Status(), now
        told.CopyFrom(self._told)
        told.running, told.decode_step_s = running, self.step_s
        told.totals.generated_tokens = self.num_tokens
        told.timing.base_s, told.timing.token_s = self.step_s, self.step_s / 1000
        self._told = told
        return told

    def _next(self, stream: int) -> StreamToken:
        left, last, ended = self._left[stream]
        token = SampledToken(token_id=_FIRST + (last + left) % _NUM_IDS)
        if left == 1:
            del self._left[stream]
            token.finish_reason = FinishReason.LENGTH
            ended.set()
        else:
            self._left[stream] = left - 1, last, ended
        self.num_tokens += 1
        return stream, token


class Workers:
    """Every public method is an order."""

    def __init__(self) -> None:
        self._host = RankHost("127.0.0.1", Identity(ProcessName.of_rank("bench", "decode-0", 0), None))
        self._workers: list[PacedWorker] = []
        self._hubs: list[FrameHub] = []
        self._servers: list[aio.Server] = []  # one that nobody holds ends

    def serve(self, number: int) -> list[tuple[str, str]]:
        """Serve so many replicas; returns the addresses of each, and of its frames."""
        return [(self._host.serve(self._register), self._host.serve_frames(self._hubs[-1])) for _ in range(number)]

    def set_step(self, seconds: float) -> None:
        for worker in self._workers:
            worker.step_s = seconds

    def collect(self) -> str:
        """Stand in for a collector of spans, which takes whatever comes; its endpoint."""
        self._collector = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
        threading.Thread(target=self._collector.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._collector.server_port}"

    def told(self) -> dict[str, float]:
        """Tokens of all so far, and by how much a step has been late at most, since this was asked last."""
        latest_s = max(worker.latest_s for worker in self._workers)
        for worker in self._workers:
            worker.latest_s = 0.0
        return {"tokens": sum(worker.num_tokens for worker in self._workers), "latest_ms": 1e3 * latest_s}

    def _register(self, server: aio.Server) -> None:
        hub = FrameHub()
        self._hubs.append(hub)
        worker = PacedWorker(f"decode-{len(self._workers)}", hub)
        self._workers.append(worker)
        self._servers.append(server)
        rpc.add_DecodeWorkerServicer_to_server(worker, server)


class _Collector(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


if __name__ == "__main__":
    obey(Workers)
    os._exit(0)
