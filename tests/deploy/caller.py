"""A client that knows both doors of a deployment, with questions whose answers it knows."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from cluster.bench.endpoints import open_endpoint
from cluster.cli.inference_client import InferenceClient
from core.rpc import inference_pb2 as pb
from core.types.errors import RequestFailed
from core.wire.client_access import EndpointAccess

_STREAMS = 8
_BEGUN_S = 120.0


class Caller:
    """Its streams are asked by one gRPC client, which takes the doors in turn."""

    def __init__(self, grpc: str, http: str, access: EndpointAccess) -> None:
        self._http = http
        self._access = access
        self._client = InferenceClient(grpc, access)
        self._undisturbed: list[list[int]] = []

    def learn(self) -> None:
        """What is answered while nothing is disturbed."""
        self._undisturbed = [self._ask(number) for number in range(_STREAMS)]

    @contextmanager
    def streams(self) -> Iterator[list[int]]:
        """Eight have begun when the block does. When it ends, its list has those whose router was lost; all others, and
        those when they are asked again, have brought the tokens that they should."""
        lost: list[int] = []
        begun = threading.Barrier(_STREAMS + 1)
        with ThreadPoolExecutor(_STREAMS) as pool:
            asked = [pool.submit(self._ask, number, begun=begun) for number in range(_STREAMS)]
            begun.wait(_BEGUN_S)
            yield lost
            lost += [number for number, stream in enumerate(asked) if _is_router_lost(stream)]
            answers = {number: stream.result() for number, stream in enumerate(asked) if number not in lost}
        answers |= {number: self._ask(number) for number in lost}
        assert [answers[number] for number in range(_STREAMS)] == self._undisturbed

    def all_is_well(self) -> bool:
        """Eight streams at a time, and nothing happens to them."""
        with self.streams() as lost:
            pass
        return not lost

    def each_doors_turn(self) -> float:
        """The seconds of the slower of two answers by gRPC, of two tokens each."""
        return max(_seconds(lambda number=number: self._ask(number, max_tokens=2)) for number in range(2))

    @contextmanager
    def over_http(self) -> Iterator[Callable[[], float]]:
        """Yields what asks six times, of connections to every door that are there before; it returns the seconds of the
        slowest answer, of two tokens each."""

        async def ask() -> None:
            assert sum([item async for item in endpoint.ask([*range(900, 932)], max_tokens=2, timeout_s=60)][:-1]) == 2

        with asyncio.Runner() as runner:
            opening = open_endpoint(self._http, self._access)
            endpoint = runner.run(opening.__aenter__())
            try:
                for _ in range(10):
                    runner.run(ask())
                yield lambda: max(_seconds(lambda: runner.run(ask())) for _ in range(6))
            finally:
                runner.run(opening.__aexit__(None, None, None))

    def _ask(self, number: int, *, max_tokens: int = 96, begun: threading.Barrier | None = None) -> list[int]:
        """The tokens of one stream; `begun` is met when it has its first ones."""
        sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=number, ignore_eos=True)
        # More than a decode replica computes itself
        prompt = f"Chapter {number}. " + "Once upon a time there was a host that lost its power. " * 6
        tokens: list[int] = []
        for event in self._client.generate(pb.GenerateRequest(prompt=prompt, sampling=sampling), timeout_s=180):
            tokens += event.delta.token_ids
            if begun and len(tokens) > 4:
                begun.wait(_BEGUN_S)
                begun = None
        return tokens


def _seconds(work: Callable[[], object]) -> float:
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


def _is_router_lost(stream: Future[list[int]]) -> bool:
    error = stream.exception()
    return isinstance(error, RequestFailed) and "its router was lost" in str(error)
