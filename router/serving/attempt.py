"""One try to serve a request on one pair of replicas.

1  router → D   Generate: the lease                    D: reserved(handoff)
2  router → P   Prefill(handoff)                       P: first tokens, then shipped
3  D → router   tokens 2…n in the frames; the first ones too where D computes the prompt itself
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
from grpc import aio

from cluster.rpc import worker_pb2 as pb
from cluster.rpc import worker_pb2_grpc as rpc
from cluster.wire.channel import error_of
from cluster.wire.messages import (
    handoff_from_proto,
    handoff_to_proto,
    holder_to_proto,
    sequence_to_proto,
    tokens_from_proto,
)
from cluster.words.errors import (
    CapacityError,
    ClusterError,
    DeadlineExceeded,
    LayoutMismatch,
    ReplicaLost,
    TransferError,
)
from cluster.words.handoff import Handoff
from cluster.words.request import SampledToken, SequenceRequest
from router.generation import RequestRoute
from router.serving.choices import Choices
from router.serving.move import Place
from router.serving.pair import Pair
from router.serving.places import Places
from router.serving.replicas import Replica

logger = logging.getLogger(__name__)

_SHIPPED_S = 1.0  # the account of a transfer may come a little later than the tokens that prove it
_STOP_S = 1.0


def may_retry(error: ClusterError) -> bool:
    """Whether another replica may succeed where this error came from one."""
    return isinstance(error, ReplicaLost | CapacityError | TransferError) and not isinstance(error, LayoutMismatch)


class Attempt:
    """Serves `request` on `pair`.

    `emit(choice, token)` gets every token once and in order. `run` returns when all choices have finished, and raises
    ClusterError when this pair cannot go on; what was emitted until then stays valid. A prefill replica that fails
    before it has brought a token is replaced by `next_prefill()`, under the same handoff and its next epoch.
    """

    def __init__(
        self,
        request: SequenceRequest,
        pair: Pair,
        *,
        router: str,
        route: RequestRoute,
        emit: Callable[[int, SampledToken], None],
        next_prefill: Callable[[], Pair | None],
        next_place: Callable[[], Place | None] = lambda: None,
    ) -> None:
        self._request = request
        self._prefill = pair.prefill
        self._decode = pair.decode
        self._holder = pair.holder
        self._answered = pair.answered
        self._router = router
        self._route = route
        self._choices = Choices(request.choices, emit, has_prefill=pair.prefill is not None)
        self._next_prefill = next_prefill
        self._expires_at = None if request.deadline_s is None else time.monotonic() + request.deadline_s
        self.places = Places(
            request, self._choices, pair.promise, router=router, route=route, next_place=next_place, spawn=self._spawn
        )
        self._prefilling: asyncio.Task[None] | None = None

    async def run(self) -> None:
        if self._decode:
            self.places.begin(self._decode)
        tasks = [self._spawn(self._lease(self._decode) if self._decode else self._prefill_only())]
        try:
            await self._choices.wait()
            if self._prefilling and self._decode:
                await asyncio.wait({self._prefilling}, timeout=_SHIPPED_S)
        finally:
            self._answered()
            tasks += [self._prefilling] if self._prefilling else []
            for task in tasks:
                task.cancel()
            await self.places.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self, choice: int) -> None:
        """This choice needs no more tokens; none will follow."""
        self._choices.finish(choice)
        if self._choices.unfinished and (place := self.places.of(choice)):
            request = pb.StopRequest(router=self._router, streams=[place.stream])
            with suppress(aio.AioRpcError):  # a replica that is lost generates nothing any more
                await rpc.DecodeWorkerStub(place.replica.channel).Stop(request, timeout=_STOP_S)

    @property
    def blameless(self) -> set[str]:
        """The prefill replica whose part is done: what fails after that is not its fault, and it has the prompt."""
        return {self._prefill.id} if self._prefill and self._choices.is_decoding else set()

    # The lease, on D.

    async def _lease(self, decode: Replica) -> None:
        request = pb.GenerateRequest(
            sequence=sequence_to_proto(self._request),
            prefill_here=self._prefill is None,
            router=self._router,
            holder=self._holder_for(decode) if self._prefill is None else None,
        )
        decode.num_requests += 1
        call = rpc.DecodeWorkerStub(decode.channel).Generate(request, timeout=self._remaining_s)
        try:
            async for event in call:
                kind = event.WhichOneof("event")
                if kind == "reserved":
                    self._reserved(event.reserved)
                elif kind == "started":
                    self._choices.started(epoch=event.started.epoch)
                    if self._prefill is None:
                        self._route.pulled_tokens = event.started.pulled_tokens
        except aio.AioRpcError as error:
            if self.places.on(decode):
                self._choices.fail(self._error_of(error, decode))
        finally:
            decode.num_requests -= 1
            call.cancel()

    def _reserved(self, reserved: pb.Reserved) -> None:
        assert self._decode
        self._route.decode_replica = self._decode.id
        if self._prefill is None:
            self._route.prefill_replica = ""
            self._route.cached_tokens = reserved.cached_tokens
        else:
            self._prefilling = self._spawn(self._prefill_along(handoff_from_proto(reserved.handoff)))

    # The prompt, on P.

    async def _prefill_only(self) -> None:
        await self._try_prefills(lambda replica, epoch: self._call_prefill(replica, None))

    async def _prefill_along(self, handoff: Handoff) -> None:
        await self._try_prefills(
            lambda replica, epoch: self._call_prefill(replica, replace(handoff, epoch=handoff.epoch + epoch))
        )

    async def _try_prefills(self, call: Callable[[Replica, int], Coroutine[Any, Any, None]]) -> None:
        epoch = 0
        while self._prefill:
            try:
                return await self._prefill.unless_lost(call(self._prefill, epoch))
            except ClusterError as error:
                self._answered()
                other = None if self._choices.has_first or not may_retry(error) else self._next_prefill()
                if other:
                    self._prefill, self._holder, self._answered = other.prefill, other.holder, other.answered
                else:
                    self._prefill = None
                    self._choices.fail(error)
            epoch += 1

    async def _call_prefill(self, prefill: Replica, handoff: Handoff | None) -> None:
        """Raises ClusterError if the prompt's KV did not arrive."""
        request = pb.PrefillRequest(
            sequence=sequence_to_proto(self._request),
            handoff=handoff_to_proto(handoff) if handoff else None,
            holder=self._holder_for(prefill),
        )
        prefill.num_requests += 1
        call = rpc.PrefillWorkerStub(prefill.channel).Prefill(request, timeout=self._remaining_s)
        try:
            async for event in call:
                if event.WhichOneof("event") == "first_tokens":
                    self._answered()
                    self._route.prefill_replica = prefill.id
                    self._route.cached_tokens = event.first_tokens.cached_tokens
                    self._route.pulled_tokens = event.first_tokens.pulled_tokens
                    epoch = handoff.epoch if handoff else 0
                    self._choices.first(tokens_from_proto(event.first_tokens.tokens), epoch=epoch)
                else:
                    self._route.blocks_shipped += event.shipped.blocks
                    self._route.wire_bytes += event.shipped.wire_bytes
        except aio.AioRpcError as error:
            raise self._error_of(error, prefill) from error
        finally:
            prefill.num_requests -= 1
            self._answered()
            call.cancel()

    def _holder_for(self, replica: Replica) -> pb.Holder | None:
        return holder_to_proto(self._holder) if self._holder and self._holder.replica != replica.id else None

    @property
    def _remaining_s(self) -> float | None:
        """Each call carries the request's deadline, so that the workers too drop what nobody waits for any more."""
        return None if self._expires_at is None else max(0.0, self._expires_at - time.monotonic())

    def _error_of(self, error: aio.AioRpcError, replica: Replica) -> ClusterError:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and self._expires_at is not None:
            return DeadlineExceeded(f"request {self._request.id}: not finished within its deadline")
        return error_of(error, peer=replica.id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose failure ends the attempt, also one that nobody foresaw."""

        def done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()):
                logger.error("attempt failed request=%s", self._request.id, exc_info=error)
                self._choices.fail(ClusterError(f"internal error: {error!r}"))

        task = asyncio.create_task(work)
        task.add_done_callback(done)
        return task
