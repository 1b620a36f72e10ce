"""Client of both endpoints of a deployment, with prompts whose answers it knows."""

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
    """Client with gRPC streams that alternate between the endpoints."""

    def __init__(self, grpc: str, http: str, access: EndpointAccess) -> None:
        self._http = http
        self._access = access
        self._client = InferenceClient(grpc, access)
        self._undisturbed: list[list[int]] = []

    def learn(self) -> None:
        """Record the undisturbed answers."""
        self._undisturbed = [self._ask(number) for number in range(_STREAMS)]

    @contextmanager
    def streams(self) -> Iterator[list[int]]:
        """Yield a list while eight streams run. At the end it contains those whose router was lost.

        All other streams, and the lost ones when retried, must have returned the correct tokens.
        """
        lost: list[int] = []
        begun = threading.Barrier(_STREAMS + 1)
        with ThreadPoolExecutor(_STREAMS) as pool:
            futures = [pool.submit(self._ask, number, begun=begun) for number in range(_STREAMS)]
            begun.wait(_BEGUN_S)
            yield lost
            lost += [number for number, stream in enumerate(futures) if _is_router_lost(stream)]
            answers = {number: stream.result() for number, stream in enumerate(futures) if number not in lost}
        answers |= {number: self._ask(number) for number in lost}
        assert [answers[number] for number in range(_STREAMS)] == self._undisturbed

    def all_is_well(self) -> bool:
        """Check eight concurrent undisturbed streams."""
        with self.streams() as lost:
            pass
        return not lost

    def each_endpoint_in_turn(self) -> float:
        """Return the seconds of the slower of two gRPC answers of two tokens, one per endpoint."""
        return max(_seconds(lambda number=number: self._ask(number, max_tokens=2)) for number in range(2))

    @contextmanager
    def over_http(self) -> Iterator[Callable[[], float]]:
        """Yield a function that sends six requests over open connections to every endpoint.

        It returns the seconds of the slowest answer, of two tokens each.
        """

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
        """Return the tokens of one stream. `begun`: barrier to enter after the first tokens."""
        sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=number, ignore_eos=True)
        # More than a decode replica computes itself.
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
