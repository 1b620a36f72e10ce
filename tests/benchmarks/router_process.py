"""The router of tests.benchmarks.router_costs, in a process of its own: all of it but what finds replicas."""

from __future__ import annotations

import cProfile
import os
import tempfile
import time
from pathlib import Path

import psutil

from cluster.index.membership import Member
from cluster.process.ordered_process import obey
from cluster.wire.rank_host import RankHost
from cluster.words.papers import Identity
from cluster.words.request import Role
from router.access.access import Access
from router.doors.connections import HTTP_DOOR
from router.doors.grpc_api import open_grpc_api
from router.doors.http_listener import HttpListener
from router.doors.openai_api import create_app
from router.metrics import Metrics
from router.routing.chooser import Chooser
from router.routing.plain_policies import make_policy
from router.serving.core import RouterCore
from router.serving.dispatch import Dispatch
from router.serving.grpc_worker import GrpcWorker
from router.serving.replicas import Replicas
from router.text.chat_template import ChatTemplate, find_chat_template
from router.text.completion import Completions
from router.text.completion_request import ModelCard
from router.text.tokenizer import Tokenizer
from tests.identities import router
from tests.router.tiny_tokenizers import make_byte_level

_CONTEXT = 131_072


class Router:
    """Every public method is an order."""

    def __init__(self) -> None:
        self._host = RankHost("127.0.0.1", Identity(router(), None))  # for its loop: uvloop, on a thread
        self._profile = cProfile.Profile()

    def serve(self, worker: str) -> dict[str, int]:
        """The ports of both doors."""
        return self._host.call(self._serve(worker), timeout_s=60.0)

    def processor_s(self) -> float:
        return time.process_time()

    def memory_bytes(self) -> int:
        return int(psutil.Process().memory_info().rss)

    def profile(self, path: str) -> None:
        """Begin, with nothing; end, and write it there."""
        self._host.call(self._set_profile(path), timeout_s=10.0)

    async def _set_profile(self, path: str) -> None:
        if not path:
            self._profile.enable()
        else:
            self._profile.disable()
            self._profile.dump_stats(path)

    async def _serve(self, worker: str) -> dict[str, int]:
        model_dir = make_byte_level(Path(tempfile.mkdtemp()))
        tokenizer, metrics = Tokenizer(model_dir), Metrics()
        self._replicas = Replicas(
            lambda member: GrpcWorker(member.replica, member.address, identity=self._host.identity)
        )
        dispatch = Dispatch(
            self._replicas,
            Chooser(make_policy("cost", pulls=True), max_local_tokens=_CONTEXT),
            model="tiny",
            block_size=16,
            queue_s=60.0,
            max_waiting=10_000,
            metrics=metrics,
        )
        completions = Completions(
            token_service=RouterCore(dispatch),
            tokenizer=tokenizer,
            chat_template=ChatTemplate(find_chat_template(model_dir), special_tokens=tokenizer.special_tokens),
            model=ModelCard(
                id="tiny", max_context=_CONTEXT, vocab_size=tokenizer.vocab_size, dtype="float32", max_choices=8
            ),
            metrics=metrics,
            max_request_s=3600.0,
        )
        access = Access.anybody()
        grpc = await open_grpc_api(completions, access=access, host="127.0.0.1", port=0)
        app = create_app(completions, access=access, is_healthy=lambda: True)
        http = await HttpListener.open(app, host="127.0.0.1", port=0, limits=HTTP_DOOR)
        member = Member(
            replica="decode-0",
            role=Role.DECODE,
            address=worker,
            layout="",
            num_blocks=1 << 20,
            block_size=16,
            bytes_per_token=1,
            max_tokens=_CONTEXT,
            max_running=10_000,
        )
        self._replicas.add(member)
        while not self._replicas.usable(Role.DECODE):
            await self._replicas.changed(timeout_s=30.0)
        self._doors = grpc, http  # a server of gRPC ends when nobody holds it
        return {"grpc": grpc.port, "http": http.address[1]}


if __name__ == "__main__":
    obey(Router)
    os._exit(0)
