"""Prefill role of a rank, and its gRPC service for routers, which runs on the event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, TypeAlias

from grpc import aio

from core.rpc import worker_pb2 as pb
from core.rpc import worker_pb2_grpc as rpc
from core.spec.schema import Spec
from core.types.errors import ClusterError
from core.types.handoff import Handoff
from core.types.launch import Launch
from core.types.request import Role, SampledToken
from core.types.role_switch import hindrance
from core.wire.call_errors import aborting
from core.wire.messages import prompt_logprobs_to_proto, to_message, tokens_to_proto
from core.wire.thread_events import CallEvents
from engine.config import EngineConfig
from engine.scheduler.prompts import Prompt
from kvtransfer.protocol.rank_transfer import Shipment
from prefill_worker.worker import PrefillWorker
from worker.answer_server import AnswerServicer
from worker.rank_process import RankProcess
from worker.request_validation import prefix_source_of
from worker.role_parts import LeaderParts, RoleParts

_Context: TypeAlias = aio.ServicerContext[Any, Any]


def make_rank(launch: Launch, **arguments: Any) -> RankProcess:
    """Create one rank of a prefill replica. Called by the controller."""
    parts = RoleParts(
        role=Role.PREFILL,
        servicer=PrefillServicer(),
        make_worker=_make_worker,
        configure=_configure,
    )
    return RankProcess(launch, role=parts, **arguments)


def _configure(config: EngineConfig, spec: Spec) -> EngineConfig:
    """Set the number of rows to record CUDA graphs for.

    Covers local decodes, and the decode role if the replica may switch to it later.
    """
    rows = int(spec.prefill.local_decode_share * spec.prefill.max_running)
    if not hindrance(spec):
        rows = max(rows, spec.decode.max_running)
    return replace(config, recorded_rows=rows if spec.engine.cuda_graphs == "auto" else 0)


def _make_worker(parts: LeaderParts) -> PrefillWorker:
    return PrefillWorker(replace(parts.engine, limits=replace(parts.engine.limits, decodes=False)))


class PrefillServicer(rpc.PrefillWorkerServicer, AnswerServicer):
    """Servicer for prompts, one call each, and for local decodes."""

    def register(self, server: aio.Server) -> None:
        rpc.add_PrefillWorkerServicer_to_server(self, server)
        super().register(server)

    async def Prefill(self, request: pb.PrefillRequest, context: _Context) -> AsyncIterator[pb.PrefillEvent]:
        async with aborting(context):
            service = self.loaded()
            sequence = await service.sequence_of(request.sequence)
            handoff = service.handoff_of(request.handoff) if request.HasField("handoff") else None
            prefix_source = prefix_source_of(request)
            service.check_takes_work()  # last, because compiling a grammar takes time
            worker, prompt = service.worker, Prompt(sequence, fetch_only=request.fetch_only)
            assert isinstance(worker, PrefillWorker)
            call = _Call(prompt, handoff)
            service.post(lambda: worker.prefill(prompt, handoff, call, prefix_source=prefix_source))
            try:
                async for event in call.events:
                    yield event
            finally:
                service.post(lambda: worker.cancel(prompt))


class _Call:
    """Listener that passes events of a prompt from the step thread to its gRPC call."""

    def __init__(self, prompt: Prompt, handoff: Handoff | None) -> None:
        self.events: CallEvents[pb.PrefillEvent] = CallEvents()
        self._prompt = prompt
        self._handoff = handoff

    def first_tokens(self, tokens: list[SampledToken]) -> None:
        prompt = self._prompt
        for part in prompt_logprobs_to_proto(prompt.take_scores()):
            self.events.put(pb.PrefillEvent(prompt_logprobs=part))
        first_tokens = pb.FirstTokens(
            tokens=tokens_to_proto(tokens),
            cached_tokens=prompt.num_found,
            fetched_tokens=prompt.num_from_peers,
            spent=to_message(pb.Spent, prompt.spent) if prompt.spent else None,
        )
        self.events.put(pb.PrefillEvent(first_tokens=first_tokens))

    def ended(self, shipment: Shipment | None, error: ClusterError | None) -> None:
        if shipment:
            self.events.put(pb.PrefillEvent(shipped=self._shipped(shipment)))
        self.events.end(error)

    def _shipped(self, shipment: Shipment) -> pb.Shipped:
        assert self._handoff
        blocks = self._prompt.sequence.num_blocks_for(self._handoff.num_missing_tokens)
        return pb.Shipped(blocks=blocks, wire_bytes=shipment.wire_bytes, seconds=shipment.seconds)
