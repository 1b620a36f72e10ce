"""Manually driven router, so that a test can do each step of a request wrongly."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from core.identity.process_name import ProcessName
from core.rpc import worker_pb2 as pb
from core.types.errors import ClusterError
from core.types.handoff import Handoff
from core.types.request import Sampling, SequenceRequest
from core.wire.messages import from_message
from router.serving.grpc_worker import GrpcWorker
from tests.support.local_cluster import LocalCluster, LocalReplica
from tests.support.waiting import becomes


@dataclass
class Fill:
    """Result of one attempt to fill a ticket."""

    first_tokens: list[int] = field(default_factory=list)
    # Empty if the KV was received.
    error: str = ""


class HeldRequest:
    """Request with reserved blocks on a decode replica, and the ticket to them."""

    def __init__(
        self, request: SequenceRequest, handoff: Handoff, tokens: list[int], give_up: Callable[[], None]
    ) -> None:
        """give_up: ends the lease, like a router whose client has gone."""
        self.request = request
        self.give_up = give_up
        self.handoff = handoff
        self.error = ""
        # First token by epoch, as reported by the prefill replica.
        self.first: dict[int, int] = {}
        self.lease: asyncio.Task[None] | None = None
        self.has_started = asyncio.Event()
        self._epoch = 0
        self._tokens = tokens

    @property
    def answer(self) -> list[int]:
        """Answer tokens, complete once the lease has ended.

        The first token is from the replica that filled the ticket.
        """
        return [self.first[self._epoch], *self._tokens] if self._epoch in self.first else []

    def started(self, epoch: int) -> None:
        self._epoch = epoch
        self.has_started.set()


class HandRouter:
    """Router with a regular certificate and the real protocol. An async context manager."""

    def __init__(self, cluster: LocalCluster, sampling: Sampling, *, deadline_s: float) -> None:
        self._cluster = cluster
        self._sampling = sampling
        self._deadline_s = deadline_s
        self._identity = cluster.identity(ProcessName.of_router(cluster.spec.name, "router-9"))
        self._workers: dict[str, GrpcWorker] = {}
        self._tokens: defaultdict[int, list[int]] = defaultdict(list)
        self._listeners: dict[str, asyncio.Task[None]] = {}
        # Received frames by replica.
        self._num_frames: defaultdict[str, int] = defaultdict(int)
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_requests = 0

    async def __aenter__(self) -> HandRouter:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._workers.values():
            await worker.close()

    async def hold(self, prompt: list[int], decode: LocalReplica) -> HeldRequest:
        """Reserve blocks without giving the ticket to anyone. Raises ClusterError."""
        worker = await self._worker(decode, listens=True)
        self._num_requests += 1
        request = SequenceRequest(
            id=f"held-{self._num_requests}",
            token_ids=tuple(prompt),
            num_prompt_tokens=len(prompt),
            sampling=self._sampling,
            stream=self._num_requests,
        )
        call = worker.generate(request, timeout_s=self._deadline_s)
        event = await anext(call)
        held = HeldRequest(
            request, from_message(Handoff, event.reserved.handoff), self._tokens[request.stream], call.cancel
        )

        async def lease() -> None:
            try:
                async for event in call:
                    if event.WhichOneof("event") == "started":
                        held.started(event.started.epoch)
                    elif event.WhichOneof("event") == "finished":
                        # The last tokens may still be in flight.
                        await becomes(partial(self._have_come, decode.id, event.finished.frames))
            except ClusterError as error:
                held.error = str(error)
            finally:
                call.cancel()

        held.lease = self._start(lease())
        return held

    def _have_come(self, replica: str, num_frames: int) -> bool:
        return self._num_frames[replica] >= num_frames

    async def fill(
        self, held: HeldRequest, prefill: LocalReplica, handoff: Handoff, *, prompt: list[int] | None = None
    ) -> Fill:
        """Let a prefill replica compute `prompt` (default: the request's) and send the KV along this ticket, whatever
        the ticket's state."""
        worker, fill = await self._worker(prefill), Fill()
        request = (
            replace(held.request, token_ids=tuple(prompt), num_prompt_tokens=len(prompt)) if prompt else held.request
        )
        call = worker.prefill(request, handoff=handoff, timeout_s=self._deadline_s)
        try:
            async for event in call:
                if event.WhichOneof("event") == "first_tokens":
                    fill.first_tokens = [token.token_id for token in event.first_tokens.tokens]
        except ClusterError as error:
            fill.error = str(error)
        finally:
            call.cancel()
        if fill.first_tokens and handoff.id == held.handoff.id:
            held.first[handoff.epoch] = fill.first_tokens[0]
        return fill

    async def _worker(self, replica: LocalReplica, *, listens: bool = False) -> GrpcWorker:
        """Return the connection to a replica.

        listens: first follow its frames (again, after a loss), as a router does before it sends requests.
        """
        if replica.id not in self._workers:
            self._workers[replica.id] = GrpcWorker(self._cluster.seen(replica).member, identity=self._identity)
        worker, listener = self._workers[replica.id], self._listeners.get(replica.id)
        if listens and (listener is None or listener.done()):
            listening = asyncio.Event()
            self._num_frames[replica.id] = 0
            self._listeners[replica.id] = self._start(self._listen(replica.id, worker, listening))
            await asyncio.wait_for(listening.wait(), self._deadline_s)
        return worker

    async def _listen(self, replica: str, worker: GrpcWorker, listening: asyncio.Event) -> None:
        def take(frame: pb.Frame) -> None:
            for stream, token_id in zip(frame.plain_streams, frame.plain_token_ids, strict=True):
                self._tokens[stream].append(token_id)
            for some in frame.streams:
                self._tokens[some.stream] += [token.token_id for token in some.tokens]
            self._num_frames[replica] = frame.number + 1
            listening.set()

        # The case killed the replica.
        with suppress(ClusterError):
            await worker.follow(take)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        return task
