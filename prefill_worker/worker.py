"""What a prefill replica does with its engine's steps, on rank 0: ship prompts while they are computed; commit; and
answer its guests."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from core.rpc import worker_pb2 as pb
from core.types.errors import ClusterError, HandoffExpired, TransferError
from core.types.handoff import Handoff, HandoffKey, PrefixSource
from core.types.request import SampledToken
from core.types.validation import check
from core.wire.frames import StreamToken
from engine.scheduler.prompts import Prompt
from engine.scheduler.step import Prefilled, ScheduledStep
from engine.scheduler.step_commands import BeginOrder, Orders
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.outgoing_transfers import OutgoingTransfer, OutgoingTransfers
from kvtransfer.protocol.plan import sending_ranks
from kvtransfer.protocol.rank_transfer import Shipment
from prefill_worker.local_decode import LocalDecoding
from worker.replica_engine import EngineParts, ReplicaEngine

logger = logging.getLogger(__name__)


class PromptListener(Protocol):
    """Who waits for a prompt. Called on the step thread."""

    def first_tokens(self, tokens: list[SampledToken]) -> None: ...

    def ended(self, shipment: Shipment | None, error: ClusterError | None) -> None:
        """Last, and once: the KV has landed (the shipment of all ranks together), or an error says why not."""
        ...


@dataclass(eq=False)
class _Job:
    """A prompt that somebody waits for."""

    listener: PromptListener
    handoff: Handoff | None  # None: only the first tokens are wanted
    outgoing: OutgoingTransfer[Prompt] | None = None  # from its first step on


class PrefillWorker:
    """All prompts of one prefill replica, and its guests: answers that it finishes itself. Everything but the
    constructor runs on the step thread.

    A prompt holds its blocks while it is computed; its departure holds them until every rank has stopped reading them.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.replica = ReplicaEngine(parts, self)
        self._gang = parts.gang
        self._jobs: dict[Prompt, _Job] = {}
        self._outgoing_transfers: OutgoingTransfers[Prompt] = OutgoingTransfers(parts.blocks)
        self.local_decodes = LocalDecoding(self.replica, parts, is_taken=self._ships)
        self._orders = Orders()  # of the next step

    # What the world asks for.

    def submit(
        self,
        prompt: Prompt,
        handoff: Handoff | None,
        listener: PromptListener,
        *,
        prefix_source: PrefixSource | None = None,
    ) -> None:
        """Queue a prompt, of which `prefix_source` may hold more than is here. An error goes to the listener."""
        try:
            if handoff:  # else it would be known at the link, which others share
                fits = handoff.num_tokens <= len(prompt.sequence.tokens) <= handoff.max_tokens
                check(fits, "handoff.num_tokens", f"must be those of a prompt of {len(prompt.sequence.tokens)}")
            if handoff and (self._ships(handoff.key) or self.local_decodes.knows(handoff.key)):
                raise HandoffExpired(f"{prompt.id}: its handoff is under way already, or was")
            self.replica.add(prompt, prefix_source)
        except ClusterError as error:
            listener.ended(None, error)
            return
        self._jobs[prompt] = _Job(listener, handoff)

    def cancel(self, prompt: Prompt) -> None:
        """Nobody waits for this prompt any more. It may have ended already."""
        if job := self._jobs.pop(prompt, None):
            self.replica.totals.cancelled += 1
            self._stop(prompt, job, HandoffExpired(f"{prompt.id} is not wanted any more"))

    def landed(self, rank: int, landing: Landing) -> None:
        """A prefix that we fetch is whole on one rank."""
        self.replica.fetches.landed(rank, landing)

    def shipped(self, rank: int, shipment: Shipment) -> None:
        """One of our ranks has nothing more to send for a handoff."""
        if granted := self.replica.served_fetches.shipped(rank, shipment):
            self._count(granted)
        if moved := self.local_decodes.shipped(rank, shipment):
            self.replica.count_shipment(moved)
        outgoing = self._outgoing_transfers.ended(rank, shipment)
        if outgoing is None:
            return
        prompt = outgoing.owner
        job = self._jobs.get(prompt)
        if outgoing.error and job:
            self.replica.totals.transfer_failures += 1
            self._stop(prompt, job, outgoing.error)
            self._end(prompt, None, outgoing.error)
        elif outgoing.is_over and not outgoing.error:
            self._arrived(prompt, outgoing.shipment)

    # The step.

    def step(self) -> bool:
        """One step; False when there was nothing to do."""
        result = self.replica.step()
        for prompt in result.fetched:
            self._end(prompt, None, None)
        for prefilled in result.prefilled:
            if not prefilled.prompt.is_local_decode:
                self._finish(prefilled)
        self.local_decodes.take(result)
        for prompt, job in list(self._jobs.items()) if result.failed else ():
            if prompt.sequence in result.failed:
                error = prompt.sequence.failure
                self._stop(prompt, job, HandoffExpired(str(error)))
                self._end(prompt, None, error)
        return result.did_work

    def begin_step(self, admitted: Seq[Prompt]) -> None:
        """Implements KVConnector, as does `orders`. Here only those are admitted ahead whose prefixes are fetched."""
        fetches = self.replica.fetches
        for prompt in admitted:
            if fetches.is_fetch(prompt):
                self.replica.save_evicted()
            self.replica.clock.fetching(prompt)
            fetches.begin(prompt)
        self._orders = self.replica.orders()
        self.local_decodes.begin_step(admitted, self._orders)

    def orders(self, step: ScheduledStep) -> Orders:
        orders = self._orders
        self.replica.clock.computing(prompt for prompt, _ in step.prompts)
        self.local_decodes.computing(prompt for prompt, _ in step.prompts)
        jobs = [(prompt, self._jobs.get(prompt)) for prompt, _ in step.prompts]  # None: of a guest
        orders.begins += [
            self._begin(prompt, job) for prompt, job in jobs if job and job.handoff and job.outgoing is None
        ]
        keys = [job.handoff.key if job and job.handoff else None for _, job in jobs]
        orders.rows = [*([None] * len(step.decoding)), *keys]
        orders.aborts += self._outgoing_transfers.take_aborts()
        return orders

    # What the world is told.

    @property
    def num_requests(self) -> int:
        """Prompts that wait, compute or ship, guests, and prefixes that others fetch."""
        return (
            len(self._jobs) + len(self._outgoing_transfers) + len(self.local_decodes) + len(self.replica.served_fetches)
        )

    def take_tokens(self) -> dict[str, list[StreamToken]]:
        return self.local_decodes.take_tokens()  # the first tokens of what is shipped travel in each prompt's own call

    def status(self) -> pb.Status:
        status = self.replica.status()
        status.running += len(self._outgoing_transfers)
        self.local_decodes.add_to(status)
        return status

    # Below: one prompt from its first step to its end.

    def _ships(self, key: HandoffKey) -> bool:
        """Whether a handoff serves a prompt, or has served one."""
        waiting = (job.handoff.key for job in self._jobs.values() if job.handoff)
        return key in waiting or self._outgoing_transfers.knows(key)

    def _begin(self, prompt: Prompt, job: _Job) -> BeginOrder:
        assert job.handoff
        ranks = sending_ranks(self._gang.runner.layout, num_receivers=len(job.handoff.ranks))
        sequence = prompt.sequence
        job.outgoing = self._outgoing_transfers.begin(job.handoff, sequence.blocks, ranks=ranks, owner=prompt)
        return BeginOrder(job.handoff, sequence.blocks, sequence.num_computed)

    def _finish(self, prefilled: Prefilled) -> None:
        """A prompt is computed: tell its first tokens, and commit."""
        prompt, job = prefilled.prompt, self._jobs[prefilled.prompt]
        job.listener.first_tokens(prefilled.tokens)
        if job.handoff:
            self._gang.commit(job.handoff.key, [token.token_id for token in prefilled.tokens])
        else:
            self._end(prompt, None, None)

    def _stop(self, prompt: Prompt, job: _Job, error: TransferError) -> None:
        """Do no more for a prompt: its blocks come back when the ranks have stopped reading them."""
        self.replica.cancel(prompt)
        if job.outgoing:
            self._outgoing_transfers.abort(job.outgoing, error)

    def _arrived(self, prompt: Prompt, shipment: Shipment) -> None:
        """Every rank of the decode replica has all of it."""
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
        self.replica.totals.transfers += 1
        self.replica.count_shipment(shipment)
        self.replica.link_rate.add(shipment.wire_bytes, shipment.link_s)

    def _end(self, prompt: Prompt, shipment: Shipment | None, error: ClusterError | None) -> None:
        if job := self._jobs.pop(prompt, None):
            job.listener.ended(shipment, error)
