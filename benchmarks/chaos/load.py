"""Steady load on a deployment's gRPC endpoint; each answer is compared with the undisturbed one."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import grpc
from grpc import aio

from benchmarks.chaos.question import Question, Reply, compare
from benchmarks.chaos.tally import Tally
from core.rpc import inference_pb2 as pb
from core.rpc import inference_pb2_grpc as rpc
from core.types.errors import DeployError
from core.wire.client_access import EndpointAccess, is_from_router

_ANSWER_S = 120.0
_ASK_AGAIN_S = 0.2
_UNDISTURBED_AT_ONCE = 4


class LoadGenerator:
    """Open-loop load of random `questions`: `rate` per second, or `streams` concurrent ones."""

    def __init__(
        self,
        endpoint: str,
        questions: Sequence[Question],
        *,
        access: EndpointAccess,
        rate: float,
        streams: int = 0,
        seed: int,
    ) -> None:
        """streams: number of concurrent requests; 0: use `rate`."""
        self.tally = Tally()
        self.num_running = 0
        # Share of requests that the client aborts at a random moment.
        self.abort_share = 0.0
        self._endpoint = endpoint
        self._access = access
        self._questions = questions
        self._rate = rate
        self._streams = streams
        self._random = random.Random(seed)
        self._undisturbed: dict[int, Reply] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> LoadGenerator:
        self._channel = self._access.channel(self._endpoint)
        self._stub = rpc.InferenceStub(self._channel)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._channel.close()

    async def learn(self) -> None:
        """Record the answer to each question before the first fault.

        Raises DeployError if a request fails.
        """
        places = asyncio.Semaphore(_UNDISTURBED_AT_ONCE)

        async def one(question: Question) -> None:
            async with places:
                self._undisturbed[question.number] = await self._ask(question)

        try:
            await asyncio.gather(*(one(question) for question in self._questions))
        except aio.AioRpcError as error:
            raise DeployError(
                f"{self._endpoint} fails before the first fault: {error.code().name}: {error.details()}"
            ) from None
        self.tally = Tally()

    async def run(self, seconds: float) -> None:
        """Send requests for `seconds`, then wait for the last answers."""
        end_at = time.monotonic() + seconds
        if self._streams:
            for _ in range(self._streams):
                self._start(self._ask_on(end_at))
            await asyncio.sleep(seconds)
        while time.monotonic() < end_at:
            self._start(self._one(self._random.choice(self._questions)))
            await asyncio.sleep(self._random.expovariate(self._rate))
        if self._running:
            await asyncio.wait(self._running, timeout=_ANSWER_S)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _ask_on(self, end_at: float) -> None:
        """Send one request after another."""
        while time.monotonic() < end_at:
            await self._one(self._random.choice(self._questions))

    async def _one(self, question: Question) -> None:
        self.tally.counts["sent"] += 1
        self.num_running += 1
        try:
            if self._random.random() < self.abort_share:
                await self._abort(question)
            else:
                await self._complete(question)
        finally:
            self.num_running -= 1

    async def _abort(self, question: Question) -> None:
        """Abort at a random moment. An answer or a rejection before that is not counted as a failure."""
        request = asyncio.create_task(self._ask(question))
        await asyncio.wait({request}, timeout=self._random.expovariate(2.0))
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        self.tally.counts["aborted"] += 1

    async def _complete(self, question: Question) -> None:
        begin = time.monotonic()
        while True:
            try:
                answer = await self._ask(question)
            except aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    self.tally.counts["refused"] += 1
                    self.tally.worst_rejection_s = max(self.tally.worst_rejection_s, time.monotonic() - begin)
                    return
                if is_from_router(error) or time.monotonic() - begin > _ANSWER_S:
                    self.tally.failed(f"question {question.number}: {error.code().name}: {error.details()}")
                    return
                # The router itself is gone, so the client has to retry.
                self.tally.counts["asked_again"] += 1
                await asyncio.sleep(_ASK_AGAIN_S)
            else:
                break
        self.tally.counts["completed"] += 1
        if mismatch := compare(question, answer, self._undisturbed[question.number]):
            self.tally.mismatched(mismatch)

    async def _ask(self, question: Question) -> Reply:
        message = pb.GenerateRequest()
        message.CopyFrom(question.message)
        message.model = self._access.model
        # Half of the requests miss every cache, so that blocks are transferred.
        if self._random.random() < 0.5:
            message.cache_salt = f"{self._random.getrandbits(64):x}"
        answer = Reply()
        last_at = time.monotonic()
        async for event in self._stub.Generate(message, timeout=_ANSWER_S, metadata=self._access.metadata):
            now = time.monotonic()
            if answer.token_ids:
                self.tally.paused(now - last_at)
            last_at = now
            if event.HasField("delta"):
                answer.add(event.delta)
            elif event.HasField("finished"):
                answer.finish_reason = event.finished.finish_reason
            else:
                self.tally.counts["retried"] += event.summary.trace.attempts > 1
                self.tally.counts["migrated"] += event.summary.trace.migrations > 0
        return answer
