"""Fake workers without engines, whose model is a checksum of the tokens so far.

Delays are random. A worker can be killed, fall silent, drain and reject calls, and its frames can be slow, repeated or
lost. It follows the protocol of proto/worker.proto.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Generic, TypeVar

import numpy as np

from core.rpc import worker_pb2 as pb
from core.types.errors import (
    CapacityError,
    ClusterError,
    ContextLengthExceeded,
    HandoffExpired,
    LinkClosed,
    ReplicaLost,
)
from core.types.handoff import Handoff, PrefixSource
from core.types.prompt_logprobs import PromptLogprobs
from core.types.request import Role, SampledToken, SequenceRequest, finish_reason
from core.wire.messages import prompt_logprobs_to_proto, to_message, tokens_to_proto
from tests.router.serving.virtual_time import pass_time

MAX_CONTEXT = 1000
VOCAB_SIZE = 10_000
_DELAYS_S = (0.0, 0.0, 0.001, 0.01, 0.1)
_HEARTBEAT_S = 1.0

Event = TypeVar("Event")


def next_token(
    request: SequenceRequest, choice: int, tokens: Sequence[int], *, max_context: int = MAX_CONTEXT
) -> SampledToken:
    """Return the model's next token after `tokens`, prompt included."""
    token_id = 1 + zlib.crc32(repr((choice, *tokens)).encode()) % 400
    reason = finish_reason(
        token_id,
        num_generated=len(tokens) + 1 - request.num_prompt_tokens,
        num_tokens=len(tokens) + 1,
        sampling=request.sampling,
        max_context=max_context,
    )
    return SampledToken(token_id=token_id, finish_reason=reason)


def prompt_logprobs_of(request: SequenceRequest) -> PromptLogprobs | None:
    """Return the model's log-probabilities of a prompt: each is minus the token id."""
    if (num_top := request.num_prompt_logprobs) is None:
        return None
    ids = np.array(request.token_ids[1 : request.num_prompt_tokens], np.int32)
    top_ids = np.repeat(ids[:, None], num_top, axis=1)
    return PromptLogprobs(
        logprobs_P=-ids.astype(np.float32),
        ranks_P=1 + ids,
        top_ids_PK=top_ids,
        top_logprobs_PK=-top_ids.astype(np.float32),
    )


def _in_messages(request: SequenceRequest) -> list[pb.PromptLogprobs]:
    """Split into messages of one token each, so that a call may break between them."""
    told = prompt_logprobs_of(request)
    if told is None:
        return []
    columns = told.columns
    ones = [PromptLogprobs(*(column[i : i + 1] for column in columns)) for i in range(len(told))]
    return [message for one in ones for message in prompt_logprobs_to_proto(one)]


class FakeCall(Generic[Event]):
    """Fake router.serving.grpc_worker.WorkerCall."""

    def __init__(
        self,
        request: SequenceRequest | None = None,
        *,
        on_cancel: Callable[[], None] = lambda: None,
    ) -> None:
        self.request = request
        self._on_cancel = on_cancel
        self.is_over = False
        self._events: asyncio.Queue[Event | Exception | None] = asyncio.Queue()

    def put(self, event: Event) -> None:
        if not self.is_over:
            self._events.put_nowait(event)

    def end(self, error: Exception | None = None) -> None:
        if not self.is_over:
            self.is_over = True
            self._events.put_nowait(error)

    def cancel(self) -> None:
        if not self.is_over:
            self._on_cancel()
        self.end()

    def __aiter__(self) -> FakeCall[Event]:
        return self

    async def __anext__(self) -> Event:
        event = await self._events.get()
        if event is None or isinstance(event, Exception):
            self._events.put_nowait(None)
            try:
                raise event or StopAsyncIteration
            finally:
                del event  # avoids a reference cycle with this frame
        return event


@dataclass(eq=False)
class Lease:
    """Request on a decode replica."""

    call: FakeCall[pb.GenerateEvent]
    request: SequenceRequest
    handoff: Handoff | None = None
    epoch: int = -1  # newest epoch seen
    has_landed: bool = False
    running: dict[int, tuple[int, list[int]]] = field(default_factory=dict)  # by stream: (choice, tokens)
    unwanted: set[int] = field(default_factory=set)


class FakeWorker:
    """Fake router.serving.grpc_worker.Worker of either role. peers: all workers by name."""

    def __init__(self, name: str, role: Role, peers: dict[str, FakeWorker], random: Random) -> None:
        self.name = name
        self.role = role
        self.is_dead = self.is_silent = self.is_draining = False
        self.num_refusals = 0  # number of further calls to reject
        self.max_tokens = MAX_CONTEXT  # of a sequence
        self.unreachable: set[str] = set()  # replicas to which its links are broken
        self.repeats = self.loses = False  # applies to the next frame
        self.is_slow = False  # frames are delayed
        self.frame_s = 0.0  # delay of the next frame; its calls are not delayed
        self._read_at = 0.0  # time of the last frame
        self.rejected: set[str] = set()  # rejected requests
        self.hits: list[str] = []  # requests that lost something here, once per loss
        self.broken: list[str] = []  # protocol rules broken by callers
        self.leases: list[Lease] = []
        self.prompts: list[FakeCall[pb.PrefillEvent]] = []
        self._peers = peers
        self._random = random
        self._wake = asyncio.Event()
        self._stream: FakeCall[pb.Frame] | None = None
        self._number = 0
        self._outgoing: list[pb.StreamTokens] = []
        self._unheard: set[str] = set()  # requests with tokens in the next frame, or in a lost one
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_well(self) -> bool:
        return not (self.is_dead or self.is_silent)

    def running(self) -> set[tuple[str, int]]:
        """Return (request, choice) of everything that decodes here."""
        return {(lease.request.id, choice) for lease in self._open_leases() for choice, _ in lease.running.values()}

    def num_held(self) -> int:
        """Return the number of open calls."""
        return len(self._open_leases()) + sum(not call.is_over for call in self.prompts)

    # Faults

    def kill(self) -> None:
        self._hit_all()
        self.is_dead = True
        for task in self._tasks:
            task.cancel()
        for call in [*(lease.call for lease in self.leases), *self.prompts, *([self._stream] if self._stream else [])]:
            call.end(ReplicaLost(f"{self.name} was killed"))

    def fall_silent(self) -> None:
        """Keep running, but send nothing any more."""
        self._hit_all()
        self.is_silent = True
        for task in self._tasks:
            task.cancel()

    def drain(self) -> None:
        self.is_draining = True
        self._wake.set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Frames

    async def follow(self, take: Callable[[pb.Frame], None]) -> None:
        stream = self._stream = FakeCall[pb.Frame](on_cancel=self._hit_all)
        self._number, self._outgoing = 0, []
        if self.is_dead:
            stream.end(ReplicaLost(f"{self.name} is dead"))
        elif not self.is_silent:
            self._send_frame(stream)
            self._spawn(self._beat(stream))
        try:
            async for frame in stream:
                take(frame)
        finally:
            stream.cancel()

    async def _beat(self, stream: FakeCall[pb.Frame]) -> None:
        while not stream.is_over:
            try:
                async with asyncio.timeout(_HEARTBEAT_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            await pass_time(self._random.choice((0.1, 0.5, 1.5) if self.is_slow else (0.0, 0.001, 0.01)))
            if not stream.is_over:  # otherwise the next stream would miss this frame number
                self._send_frame(stream)

    def _send_frame(self, stream: FakeCall[pb.Frame]) -> None:
        status = pb.Status(replica=self.name, draining=self.is_draining, running=len(self.running()), blocks_free=100)
        if self.role is Role.PREFILL:
            status.local_decodes.running = len(self.running())
        frame = pb.Frame(number=self._number, status=status, streams=self._outgoing)
        self._outgoing = []
        self._number += 1
        if self.loses:
            self.loses = False
            return
        self._unheard.clear()
        now = asyncio.get_running_loop().time()
        self._read_at = max(self._read_at, now) + self.frame_s
        if self._read_at > now:
            self._spawn(self._put(stream, frame, after_s=self._read_at - now))
        else:
            stream.put(frame)
        if self.repeats:
            self.repeats = False
            stream.put(frame)

    async def _put(self, stream: FakeCall[pb.Frame], frame: pb.Frame, *, after_s: float) -> None:
        await pass_time(after_s)
        stream.put(frame)

    def _tell(self, request_id: str, stream: int, tokens: list[SampledToken]) -> None:
        self._unheard.add(request_id)
        self._outgoing.append(pb.StreamTokens(stream=stream, tokens=tokens_to_proto(tokens)))
        self._wake.set()

    # Prefill replica

    def prefill(
        self,
        request: SequenceRequest,
        *,
        handoff: Handoff | None = None,
        prefix_source: PrefixSource | None = None,
        fetch_only: bool = False,
        timeout_s: float | None = None,
    ) -> FakeCall[pb.PrefillEvent]:
        call: FakeCall[pb.PrefillEvent] = FakeCall(request)
        self.prompts.append(call)
        if self._takes(call, request):
            self._spawn(self._compute(call, request, handoff, fetch_only))
        return call

    async def _compute(
        self, call: FakeCall[pb.PrefillEvent], request: SequenceRequest, handoff: Handoff | None, fetch_only: bool
    ) -> None:
        for _ in range(3):
            await self._pause()
        if fetch_only:
            return call.end()
        tokens = self._limited(request, [(choice, request.token_ids) for choice in request.choices])
        for message in _in_messages(request):
            await self._pause()
            call.put(pb.PrefillEvent(prompt_logprobs=message))
        first = pb.PrefillEvent(first_tokens=pb.FirstTokens(tokens=tokens_to_proto(tokens), cached_tokens=1))
        try:
            if handoff and self._random.random() < 0.5:  # the KV may arrive before its notice
                await self._ship(call, request, handoff, tokens)
                await self._pause()
                call.put(first)
            else:
                call.put(first)
                if handoff:
                    await self._ship(call, request, handoff, tokens)
                    await self._pause()
        except ClusterError as error:
            self.hits.append(request.id)
            return call.end(error)
        if handoff:
            call.put(pb.PrefillEvent(shipped=pb.Shipped(blocks=1, wire_bytes=10)))
        call.end()

    async def _ship(
        self, call: FakeCall[Any], request: SequenceRequest, handoff: Handoff, tokens: list[SampledToken]
    ) -> None:
        if handoff.replica in self.unreachable:
            raise LinkClosed(f"{handoff.replica} does not respond")
        lease = self._peers[handoff.replica].open(handoff)
        for _ in range(3):
            await self._pause()
        if not call.is_over:
            self._peers[handoff.replica].land(lease, handoff, request.token_ids, tokens)

    # Decode replica

    def generate(
        self,
        request: SequenceRequest,
        *,
        prefill_here: bool = False,
        continues: bool = False,
        prefix_source: PrefixSource | None = None,
        timeout_s: float | None = None,
    ) -> FakeCall[pb.GenerateEvent]:
        call: FakeCall[pb.GenerateEvent] = FakeCall(request)
        lease = Lease(call, request)
        self.leases.append(lease)
        if continues and len(request.choices) != 1:
            self.broken.append(f"{request.id}: several choices move as one")
        if self._takes(call, request):
            self._spawn(self._admit(lease, prefill_here))
        return call

    async def _admit(self, lease: Lease, prefill_here: bool) -> None:
        await self._pause()
        request = lease.request
        if not prefill_here:
            lease.handoff = Handoff(
                id=f"{self.name}/{request.stream}",
                epoch=0,
                replica=self.name,
                ranks=(),
                layout="",
                num_tokens=len(request.token_ids),
                max_tokens=MAX_CONTEXT,
                first_token=0,
                ttl_s=30.0,
            )
        ticket = to_message(pb.Handoff, lease.handoff) if lease.handoff else None
        lease.call.put(pb.GenerateEvent(reserved=pb.Reserved(handoff=ticket)))
        if prefill_here:
            await self._pause()
            for message in _in_messages(request):
                await self._pause()
                lease.call.put(pb.GenerateEvent(prompt_logprobs=message))
            firsts = self._limited(request, [(choice, request.token_ids) for choice in request.choices])
            self._start(lease, 0, firsts, tell=True)

    def open(self, handoff: Handoff) -> Lease:
        """Open the handoff for an epoch, which closes it to earlier ones. Raises HandoffExpired."""
        lease = next((one for one in self._open_leases() if one.handoff and one.handoff.id == handoff.id), None)
        if lease is None or not self.is_well or lease.has_landed or handoff.epoch < lease.epoch:
            raise HandoffExpired(f"{handoff.id} is closed")
        if handoff.epoch == lease.epoch:
            self.broken.append(f"{handoff.id}: two senders in epoch {handoff.epoch}")
        lease.epoch = handoff.epoch
        return lease

    def land(self, lease: Lease, handoff: Handoff, tokens: Sequence[int], firsts: list[SampledToken]) -> None:
        """Receive the complete KV of `tokens`. Raises HandoffExpired."""
        if lease.call.is_over or not self.is_well or lease.has_landed or handoff.epoch < lease.epoch:
            raise HandoffExpired(f"{handoff.id} is closed")
        if tuple(tokens[: len(lease.request.token_ids)]) != lease.request.token_ids:
            self.broken.append(f"{lease.request.id}: KV of other tokens")
        lease.has_landed = True
        if firsts:
            firsts = self._limited(lease.request, [(choice, tokens) for choice in lease.request.choices])
            self._start(lease, handoff.epoch, firsts, tell=False)
        else:  # moved: continues after its last token
            self._started(lease, handoff.epoch)
            self._run(lease, lease.request.stream, lease.request.choices[0], list(tokens))

    def _start(self, lease: Lease, epoch: int, firsts: list[SampledToken], *, tell: bool) -> None:
        if lease.call.is_over:
            return
        self._started(lease, epoch)
        request = lease.request
        for i, (choice, first) in enumerate(zip(request.choices, firsts, strict=True)):
            stream = request.stream + i
            if tell:
                self._tell(request.id, stream, [first])
            if not first.finish_reason and stream not in lease.unwanted:
                self._run(lease, stream, choice, [*request.token_ids, first.token_id])
        self._end_if_done(lease)

    def _started(self, lease: Lease, epoch: int) -> None:
        lease.call.put(pb.GenerateEvent(started=pb.Started(num_tokens=len(lease.request.token_ids), epoch=epoch)))

    def _run(self, lease: Lease, stream: int, choice: int, tokens: list[int]) -> None:
        lease.running[stream] = (choice, tokens)
        self._spawn(self._decode(lease, stream))

    async def _decode(self, lease: Lease, stream: int) -> None:
        while True:
            await self._pause()
            if lease.call.is_over or stream not in lease.running:
                return
            choice, tokens = lease.running[stream]
            new: list[SampledToken] = []
            while len(new) < self._random.randint(1, 3) and not (new and new[-1].finish_reason):
                new += self._limited(lease.request, [(choice, tokens)])
                tokens.append(new[-1].token_id)
            self._tell(lease.request.id, stream, new)
            if new[-1].finish_reason:
                self._leave(lease, stream)

    async def stop(self, streams: Sequence[int], *, timeout_s: float) -> None:
        await self._answering(timeout_s)
        for lease in self._open_leases():
            lease.unwanted |= set(streams)
            for stream in lease.unwanted & lease.running.keys():
                self._leave(lease, stream)

    async def migrate(self, stream: int, handoff: Handoff) -> pb.MigrateReply:
        await self._answering(handoff.ttl_s)
        lease = next((one for one in self._open_leases() if stream in one.running), None)
        if lease is None or self._random.random() < 0.2:
            return pb.MigrateReply(moved=False, reason="it does not suit")
        target = self._peers[handoff.replica]
        try:
            opened = target.open(handoff)
            await self._pause()
            if stream not in lease.running or lease.call.is_over:
                return pb.MigrateReply(moved=False, reason="it has ended")
            _, tokens = lease.running[stream]
            target.land(opened, handoff, tokens, [])
        except ClusterError as error:
            return pb.MigrateReply(moved=False, reason=str(error))
        self._leave(lease, stream)
        await self._answering(handoff.ttl_s)
        return pb.MigrateReply(moved=True, num_tokens=len(tokens), wire_bytes=10)

    def _leave(self, lease: Lease, stream: int) -> None:
        del lease.running[stream]
        self._end_if_done(lease)

    def _end_if_done(self, lease: Lease) -> None:
        if not lease.running:
            lease.call.put(pb.GenerateEvent(finished=pb.Finished(frames=self._number + 1)))
            lease.call.end()

    # Both roles

    def _limited(self, request: SequenceRequest, sequences: Sequence[tuple[int, Sequence[int]]]) -> list[SampledToken]:
        """Return the next token of each (choice, tokens), within this replica's size."""
        return [next_token(request, choice, tokens, max_context=self.max_tokens) for choice, tokens in sequences]

    def _open_leases(self) -> list[Lease]:
        self.leases = [lease for lease in self.leases if not lease.call.is_over]
        return self.leases

    def _takes(self, call: FakeCall[Any], request: SequenceRequest) -> bool:
        """Return whether a call is accepted. A silent worker leaves it open."""
        is_too_long = len(request.token_ids) + (self.role is Role.DECODE) > self.max_tokens
        if self.is_well and not self.is_draining and not self.num_refusals and not is_too_long:
            return True
        self.hits.append(request.id)
        if self.num_refusals and self.is_well and not self.is_draining:
            self.num_refusals -= 1
            self.rejected.add(request.id)
            call.end(CapacityError(f"{self.name} is full"))
        elif is_too_long and self.is_well and not self.is_draining:
            call.end(ContextLengthExceeded(f"{self.name} holds {self.max_tokens} tokens"))
        elif not self.is_silent:
            call.end(ReplicaLost(f"{self.name} takes no new work"))
        return False

    def _hit_all(self) -> None:
        calls = [*(lease.call for lease in self.leases), *self.prompts]
        held = [call.request.id for call in calls if call.request and not call.is_over]
        self.hits += [*held, *(self._unheard - set(held))]  # also an answer that is complete here but not delivered
        self._unheard.clear()

    async def _answering(self, timeout_s: float) -> None:
        await self._pause()
        if self.is_silent:
            await pass_time(timeout_s)
        if not self.is_well:
            raise ReplicaLost(f"{self.name} does not answer")

    async def _pause(self) -> None:
        await pass_time(self._random.choice(_DELAYS_S))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.broken.append(f"{self.name}: {error!r}")
