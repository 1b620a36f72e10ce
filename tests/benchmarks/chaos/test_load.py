"""The chaos load against a real gRPC server: counts of failures, rejections, retries and mismatches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc import aio
from grpc_status import rpc_status

from benchmarks.chaos.load import LoadGenerator
from benchmarks.chaos.question import questions
from core.rpc import inference_pb2 as pb
from core.rpc import inference_pb2_grpc as rpc
from core.types.errors import CapacityError, ClusterError, DeployError, ReplicaLost
from core.wire.client_access import EndpointAccess
from frontend.grpc.messages import status_of

Context = aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


class FakeRouter(rpc.InferenceServicer):
    """Router that answers with the characters of the prompt, until `disturb` changes that."""

    def __init__(self) -> None:
        self.disturb: Callable[[int], ClusterError | str | None] = lambda call: None
        self._num_calls = 0

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        fault = self.disturb(self._num_calls)
        self._num_calls += 1
        if isinstance(fault, ClusterError):
            await context.abort_with_status(rpc_status.to_status(status_of(fault)))
        if fault == "break":
            # As gRPC reports a lost connection: without details.
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        ids = [ord(letter) for letter in request.prompt[:20]]
        for token_id in ids[1:] if fault == "forget" else ids:
            yield pb.GenerateResponse(delta=pb.Delta(text=chr(token_id), token_ids=[token_id]))
        yield pb.GenerateResponse(finished=pb.Finished(finish_reason="length"))
        yield pb.GenerateResponse(summary=pb.Summary(trace=pb.Trace(attempts=2, migrations=1)))


@asynccontextmanager
async def _load() -> AsyncIterator[tuple[FakeRouter, LoadGenerator]]:
    router, server = FakeRouter(), aio.server()
    rpc.add_InferenceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with LoadGenerator(
            f"127.0.0.1:{port}", questions(4, max_tokens=8), access=EndpointAccess(), rate=200, seed=1
        ) as load:
            yield router, load
    finally:
        await server.stop(0)


async def test_undisturbed_run_is_clean() -> None:
    async with _load() as (_, load):
        await load.learn()
        await load.run(0.5)
        counts = load.tally.counts
        assert counts["sent"] == counts["completed"] == counts["retried"] == counts["migrated"] > 5
        assert load.tally.is_clean


@pytest.mark.parametrize(
    ("fault", "count"),
    [
        (ReplicaLost("gone"), "failed"),
        (CapacityError("full"), "refused"),
        ("break", "asked_again"),
        ("forget", "mismatched"),
    ],
)
async def test_fault_increments_its_counter(fault: ClusterError | str, count: str) -> None:
    async with _load() as (router, load):
        await load.learn()
        router.disturb = lambda call: fault if call == 6 else None
        await load.run(0.5)
        counts = load.tally.counts
        assert [counts[name] for name in ("failed", "refused", "asked_again", "mismatched")].count(1) == 1
        assert counts[count] == 1
        assert load.tally.is_clean == (count in ("refused", "asked_again"))


async def test_aborted_requests_are_not_failures() -> None:
    async with _load() as (_, load):
        await load.learn()
        load.abort_share = 1.0
        await load.run(0.5)
        await asyncio.sleep(0)
        assert load.tally.counts["aborted"] == load.tally.counts["sent"] > 2
        assert load.tally.is_clean


async def test_failure_before_the_first_fault_is_reported() -> None:
    async with _load() as (router, load):
        router.disturb = lambda call: ReplicaLost("gone")
        with pytest.raises(DeployError, match="fails before the first fault: UNAVAILABLE: gone"):
            await load.learn()
