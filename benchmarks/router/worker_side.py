"""Decode replicas of `python -m benchmarks router`, in their own process: the real protocol, no computation."""

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
# Token ids to send, cyclically.
_FIRST, _NUM_IDS = 65, 26


class PacedWorker(rpc.DecodeWorkerServicer):
    """Worker that sends one token per step to each running choice, as far as the event loop keeps up."""

    def __init__(self, replica: str, hub: FrameHub) -> None:
        self.step_s = 0.02
        self.num_tokens = 0
        # Largest delay of a step.
        self.latest_s = 0.0
        self._hub = hub
        # Stream: remaining tokens, last token, end event.
        self._left: dict[int, tuple[int, int, asyncio.Event]] = {}
        self._stepping = asyncio.ensure_future(self._step_for_ever())
        self._sent = pb.Status(replica=replica, blocks_total=NUM_BLOCKS, blocks_free=NUM_BLOCKS)
        self._sent_at = 0.0
        hub.publish({}, self._sent)

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
        """Return a status, or None if one was sent recently, like a replica."""
        running = len(self._left)
        if running == self._sent.running and now < self._sent_at + STATUS_S:
            return None
        totals, self._sent_at = pb.Status(), now
        totals.CopyFrom(self._sent)
        totals.running, totals.decode_step_s = running, self.step_s
        totals.totals.generated_tokens = self.num_tokens
        totals.timing.base_s, totals.timing.token_s = self.step_s, self.step_s / 1000
        self._sent = totals
        return totals

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
    """Workers under test. Public methods are commands from the parent process."""

    def __init__(self) -> None:
        self._host = RankHost("127.0.0.1", Identity(ProcessName.of_rank("bench", "decode-0", 0), None))
        self._workers: list[PacedWorker] = []
        self._hubs: list[FrameHub] = []
        # Servers stop when they are garbage-collected.
        self._servers: list[aio.Server] = []

    def serve(self, number: int) -> list[tuple[str, str]]:
        """Serve `number` replicas. Returns the address and the frames address of each."""
        return [(self._host.serve(self._register), self._host.serve_frames(self._hubs[-1])) for _ in range(number)]

    def set_step(self, seconds: float) -> None:
        for worker in self._workers:
            worker.step_s = seconds

    def collect(self) -> str:
        """Start a collector that accepts all spans. Returns its endpoint."""
        self._collector = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
        threading.Thread(target=self._collector.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._collector.server_port}"

    def totals(self) -> dict[str, float]:
        """Return the number of tokens so far, and the largest delay of a step since the last call."""
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
