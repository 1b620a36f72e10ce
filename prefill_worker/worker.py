"""Prefill worker on rank 0: ships prompts while they are computed, and runs local decodes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

from core.rpc import worker_pb2 as pb
from core.types.errors import CapacityError, ClusterError, HandoffExpired, TransferError
from core.types.handoff import Handoff, PrefixSource
from core.types.request import SampledToken
from core.types.validation import check
from engine.scheduler.prompts import Prompt
from engine.scheduler.step import Prefilled, ScheduledStep, StepResult
from engine.scheduler.step_commands import BeginOrder, Orders
from kvtransfer.protocol.outgoing_transfers import OutgoingTransfer, OutgoingTransfers
from kvtransfer.protocol.rank_transfer import Shipment
from worker.answers import RequestListener
from worker.migrations import MoveListener
from worker.worker import EngineParts, Worker

logger = logging.getLogger(__name__)


class PromptListener(Protocol):
    """Observer of one prompt. Called on the step thread."""

    def first_tokens(self, tokens: list[SampledToken]) -> None: ...

    def ended(self, shipment: Shipment | None, error: ClusterError | None) -> None:
        """Report the end, with the combined shipment or an error. Called last and once."""
        ...


@dataclass(eq=False)
class _Job:
    """Prompt in progress."""

    listener: PromptListener
    handoff: Handoff | None  # None: first tokens only, no KV transfer
    outgoing: OutgoingTransfer[Prompt] | None = None  # set in the first step


class PrefillWorker(Worker):
    """Prompts of one prefill replica, and its local decodes: requests that it decodes while decode replicas are full.

    A prompt holds its blocks while it is computed; its outgoing transfer holds them until no rank reads them. A local
    decode has the calls, frames and migrations of a decode replica, but computes its own prompt.
    """

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        self._jobs: dict[Prompt, _Job] = {}
        self._outgoing_transfers: OutgoingTransfers[Prompt] = OutgoingTransfers(parts.blocks, parts.gang.runner.layout)
        self._orders = Orders()  # for the next step

    # Requests from the event loop.

    def prefill(
        self,
        prompt: Prompt,
        handoff: Handoff | None,
        listener: PromptListener,
        *,
        prefix_source: PrefixSource | None = None,
    ) -> None:
        """Queue a prompt. `prefix_source` may have a longer cached prefix. Errors go to the listener."""
        try:
            if handoff:  # checked here, because the link that would notice is shared with other handoffs
                fits = handoff.num_tokens <= len(prompt.sequence.tokens) <= handoff.max_tokens
                check(fits, "handoff.num_tokens", f"must fit a prompt of {len(prompt.sequence.tokens)} tokens")
            if handoff and (self._outgoing_transfers.knows(handoff.key) or self.moves.knows(handoff.key)):
                raise HandoffExpired(f"{prompt.id}: handoff was used before")
            self._add(prompt, prefix_source)
        except ClusterError as error:
            listener.ended(None, error)
            return
        self._jobs[prompt] = _Job(listener, handoff)
        if handoff:
            self._outgoing_transfers.claim(handoff.key)

    def submit(
        self, prompt: Prompt, router: str, listener: RequestListener, *, prefix_source: PrefixSource | None = None
    ) -> None:
        """Queue a local decode."""
        prompt.is_local_decode = True
        if prompt.is_received or not self.engine.local_decodes.may_ever_fit(prompt):
            error = f"{prompt.id}: request exceeds the local decode capacity of this prefill replica"
            listener.ended(CapacityError(error))
            return
        super().submit(prompt, router, listener, prefix_source=prefix_source)

    def cancel(self, prompt: Prompt) -> None:
        """Cancel a prompt or a local decode. Does nothing if it has ended."""
        if job := self._jobs.pop(prompt, None):
            self.totals.cancelled += 1
            self._stop(prompt, job, HandoffExpired(f"{prompt.id} was cancelled"))
        else:
            super().cancel(prompt)

    def migrate(self, router: str, stream: int, handoff: Handoff, listener: MoveListener) -> None:
        if self._outgoing_transfers.knows(handoff.key):
            listener.stays("handoff was used before")
        else:
            super().migrate(router, stream, handoff, listener)

    # Results of transfers.

    def shipped(self, rank: int, shipment: Shipment) -> None:
        if served := self.served_fetches.shipped(rank, shipment):
            self._count(served)
        self._shipped_move(rank, shipment)
        outgoing = self._outgoing_transfers.ended(rank, shipment)
        if outgoing is None:
            return
        prompt = outgoing.owner
        job = self._jobs.get(prompt)
        if outgoing.error and job:
            self.totals.transfer_failures += 1
            self._stop(prompt, job, outgoing.error)
            self._end(prompt, None, outgoing.error)
        elif outgoing.is_over and not outgoing.error:
            self._arrived(prompt, outgoing.shipment)

    # Steps.

    def _take(self, result: StepResult) -> None:
        for prompt in result.fetched:
            self._end(prompt, None, None)
        local_decodes = []
        for prefilled in result.prefilled:
            if prefilled.prompt.is_local_decode:
                local_decodes.append(prefilled)
            else:
                self._finish(prefilled)
        self.answers.take(replace(result, prefilled=local_decodes))
        for prompt, job in list(self._jobs.items()) if result.failed else ():
            if prompt.sequence in result.failed:
                error = prompt.sequence.failure
                self._stop(prompt, job, HandoffExpired(str(error)))
                self._end(prompt, None, error)

    def begin_step(self, admitted: Seq[Prompt]) -> None:
        """Prepare a step. Only prompts whose prefixes are fetched are admitted ahead of their first step."""
        for prompt in admitted:
            if self.fetches.is_fetch(prompt):
                self.parts.flush_copies()
            prompt.times.begin_fetch()
            self.fetches.begin(prompt)
        self._orders = self._common_orders()
        self._report_admitted(admitted)
        self.moves.add_to(self._orders)  # before rows are chosen, because a migration may pause its sequence

    def orders(self, step: ScheduledStep) -> Orders:
        orders = self._orders
        for prompt, _ in step.prompts:
            prompt.times.begin_step()
        self._report_admitted(prompt for prompt, _ in step.prompts)
        jobs = [(prompt, self._jobs.get(prompt)) for prompt, _ in step.prompts]  # None: local decode
        orders.begins += [
            self._begin(prompt, job) for prompt, job in jobs if job and job.handoff and job.outgoing is None
        ]
        keys = [job.handoff.key if job and job.handoff else None for _, job in jobs]
        orders.rows = [*([None] * len(step.decoding)), *keys]
        orders.aborts += self._outgoing_transfers.take_aborts()
        return orders

    # Results for the event loop.

    @property
    def num_requests(self) -> int:
        """Number of prompts waiting, computing or shipping, local decodes and served fetches."""
        return super().num_requests + len(self._jobs) + len(self._outgoing_transfers)

    def status(self) -> pb.Status:
        status, local_decodes = super().status(), self.engine.local_decodes
        status.running += len(self._outgoing_transfers)
        running = local_decodes.num_choices + self.moves.num_paused
        if running or local_decodes.num_waiting:  # routers read it before they send another one
            status.local_decodes.running = running
            status.local_decodes.waiting = local_decodes.num_waiting
            status.local_decodes.blocks = local_decodes.num_blocks
            self._add_decoding(status)
        return status

    # One prompt, from its first step to its end.

    def _report_admitted(self, prompts: Iterable[Prompt]) -> None:
        """Report local decodes that have their blocks now, once each."""
        for prompt in prompts:
            if prompt.is_local_decode and not prompt.is_restart and prompt.spent is None:
                prompt.spent = prompt.times.waited()
                self.answers.listener(prompt).reserved(None, None, prompt.num_cached)

    def _begin(self, prompt: Prompt, job: _Job) -> BeginOrder:
        assert job.handoff
        sequence = prompt.sequence
        state_slots = sequence.state_slots[:1]
        job.outgoing = self._outgoing_transfers.begin(
            job.handoff, sequence.blocks, state_slots=state_slots, owner=prompt
        )
        return BeginOrder(job.handoff, sequence.blocks, sequence.num_computed, *state_slots)

    def _finish(self, prefilled: Prefilled) -> None:
        """Report the first tokens of a computed prompt, and commit its transfer."""
        prompt, job = prefilled.prompt, self._jobs[prefilled.prompt]
        job.listener.first_tokens(prefilled.tokens)
        if job.handoff:
            self.gang.commit(job.handoff.key, [token.token_id for token in prefilled.tokens])
        else:
            self._end(prompt, None, None)

    def _stop(self, prompt: Prompt, job: _Job, error: TransferError) -> None:
        """Stop a prompt. Its blocks are freed when no rank reads them."""
        self._cancel(prompt)
        if job.outgoing:
            self._outgoing_transfers.abort(job.outgoing, error)
        elif job.handoff:
            self._outgoing_transfers.release(job.handoff.key)

    def _arrived(self, prompt: Prompt, shipment: Shipment) -> None:
        """Finish a prompt whose KV has landed on every rank of the decode replica."""
        self._count(shipment)
        logger.info(
            "handoff done request=%s handoff=%s bytes=%d ms=%.1f",
            prompt.id,
            shipment.handoff,
            shipment.wire_bytes,
            shipment.seconds * 1e3,
        )
        self._end(prompt, shipment, None)

    def _count(self, shipment: Shipment) -> None:
        self.totals.transfers += 1
        self._count_shipment(shipment)
        self.link_rate.add(shipment.wire_bytes, shipment.link_s)

    def _end(self, prompt: Prompt, shipment: Shipment | None, error: ClusterError | None) -> None:
        if job := self._jobs.pop(prompt, None):
            if job.handoff:
                self._outgoing_transfers.release(job.handoff.key)
            job.listener.ended(shipment, error)
