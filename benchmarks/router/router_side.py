"""Router process of `python -m benchmarks router`: a complete router without membership discovery."""

from __future__ import annotations

import cProfile
import os
import resource
import sys
import time
from pathlib import Path

from benchmarks.router.worker_side import NUM_BLOCKS, ROUTER
from core.identity.credentials import Identity
from core.identity.process_name import ProcessName
from core.index.membership import Member
from core.process.child_process import obey
from core.process.interpreter import spare_the_old
from core.spec.schema import TracingSpec
from core.types.request import Role
from core.wire.rank_server import RankHost
from frontend.access.access import Access
from frontend.chat.chat_template import ChatTemplate, find_chat_template
from frontend.grpc.api import open_grpc_api
from frontend.http.app import create_app
from frontend.http.connections import HTTP_ENDPOINT, HttpListener
from frontend.text.completion import Completions
from frontend.text.completion_request import ModelCard
from frontend.text.tokenizer import Tokenizer
from router.routing.chooser import Chooser
from router.routing.policies import make_policy
from router.serving.core import RouterCore
from router.serving.grpc_worker import GrpcWorker
from router.serving.replicas import Replicas
from router.telemetry.metrics import Metrics
from router.telemetry.tracing import Tracing

MAX_RUNNING = 256  # of each replica
_CONTEXT = 131_072
_BLOCK_SIZE = 16
_READY_S = 30.0


class MeasuredRouter:
    """Router under test. Its public methods are commands from the parent process."""

    def __init__(self, model_dir: Path) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._host = RankHost("127.0.0.1", Identity(ProcessName.of_router("bench", ROUTER), None))
        self._model_dir = model_dir
        self._profile = cProfile.Profile()

    def serve(self, workers: list[tuple[str, str]], collector: str = "", ratio: float = 0.0) -> dict[str, int]:
        """Open both endpoints. Returns their ports.

        workers: address and frames address of each decode replica. collector: OTLP endpoint that receives the spans of
        `ratio` of the requests.
        """
        spec = TracingSpec(otlp_endpoint=collector or None, ratio=ratio)
        self._tracing = Tracing.of(spec, deployment="bench", router=ROUTER)
        return self._host.call(self._serve(workers), timeout_s=60.0)

    def flush(self) -> None:
        """Send the pending spans."""
        if self._tracing:
            self._tracing.flush()

    def processor_s(self) -> float:
        """Return the CPU seconds of all threads."""
        return time.process_time()

    def memory_bytes(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def profile(self, path: str) -> None:
        """Start profiling the event loop if `path` is empty; otherwise stop and write the statistics there."""
        self._host.call(self._set_profile(path), timeout_s=10.0)

    async def _set_profile(self, path: str) -> None:
        if not path:
            self._profile.enable()
        else:
            self._profile.disable()
            self._profile.dump_stats(path)

    async def _serve(self, workers: list[tuple[str, str]]) -> dict[str, int]:
        tokenizer, metrics = Tokenizer(self._model_dir), Metrics()
        self._replicas = Replicas(lambda member: GrpcWorker(member, identity=self._host.identity))
        core = RouterCore(
            self._replicas,
            Chooser(make_policy("cost", prefix_fetches=True), max_local_tokens=_CONTEXT),
            model="bench",
            block_size=_BLOCK_SIZE,
            vocab_size=tokenizer.vocab_size,
            queue_s=60.0,
            max_waiting=10_000,
            metrics=metrics,
        )
        completions = Completions(
            token_service=core,
            tokenizer=tokenizer,
            chat_template=ChatTemplate(find_chat_template(self._model_dir), special_tokens=tokenizer.special_tokens),
            model=ModelCard(
                id="bench", max_context=_CONTEXT, vocab_size=tokenizer.vocab_size, dtype="float32", max_choices=8
            ),
            metrics=metrics,
            max_request_s=3600.0,
            tracing=self._tracing,
        )
        access = Access.anybody()
        grpc = await open_grpc_api(completions, access=access, host="127.0.0.1", port=0)
        app = create_app(completions, access=access, is_healthy=lambda: True)
        http = await HttpListener.open(app, host="127.0.0.1", port=0, limits=HTTP_ENDPOINT)
        for number, addresses in enumerate(workers):
            self._replicas.add(_member(f"decode-{number}", *addresses))
        while len(self._replicas.usable(Role.DECODE)) < len(workers):
            await self._replicas.changed(timeout_s=_READY_S)
        spare_the_old()
        # gRPC servers stop when they are garbage-collected.
        self._endpoints = grpc, http
        return {"grpc": grpc.port, "http": http.address[1]}


def _member(replica: str, address: str, frames_address: str) -> Member:
    return Member(
        replica=replica,
        role=Role.DECODE,
        address=address,
        frames_address=frames_address,
        layout="",
        num_blocks=NUM_BLOCKS,
        block_size=_BLOCK_SIZE,
        bytes_per_token=1,
        max_tokens=_CONTEXT,
        max_running=MAX_RUNNING,
    )


if __name__ == "__main__":
    obey(lambda: MeasuredRouter(Path(sys.argv[2])))
    os._exit(0)
