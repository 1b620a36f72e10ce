"""Prefill worker on rank 0: ships prompts while they are computed, and runs local decodes."""

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


class PrefillWorker:
    """Prompts and local decodes of one prefill replica. All methods but the constructor run on the step thread.

    A prompt holds its blocks while it is computed; its outgoing transfer holds them until no rank reads them.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.replica = ReplicaEngine(parts, self)
        self._gang = parts.gang
        self._jobs: dict[Prompt, _Job] = {}
        self._outgoing_transfers: OutgoingTransfers[Prompt] = OutgoingTransfers(parts.blocks)
        self.local_decodes = LocalDecoding(self.replica, parts, is_taken=self._ships)
        self._orders = Orders()  # for the next step

    # Requests from the event loop.

    def submit(
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
            if handoff and (self._ships(handoff.key) or self.local_decodes.knows(handoff.key)):
                raise HandoffExpired(f"{prompt.id}: handoff was used before")
            self.replica.add(prompt, prefix_source)
        except ClusterError as error:
            listener.ended(None, error)
            return
        self._jobs[prompt] = _Job(listener, handoff)

    def cancel(self, prompt: Prompt) -> None:
        """Cancel a prompt. Does nothing if it has ended."""
        if job := self._jobs.pop(prompt, None):
            self.replica.totals.cancelled += 1
            self._stop(prompt, job, HandoffExpired(f"{prompt.id} was cancelled"))

    def landed(self, rank: int, landing: Landing) -> None:
        """Record that a fetched prefix has landed on one rank."""
        self.replica.fetches.landed(rank, landing)

    def shipped(self, rank: int, shipment: Shipment) -> None:
        """Record that one rank has ended its part of a handoff."""
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

    # Steps.

    def step(self) -> bool:
        """Run one step. Returns False if there was nothing to do."""
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
        """Prepare a step; implements KVConnector, as does `orders`.

        Only prompts whose prefixes are fetched are admitted ahead of their first step.
        """
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
        return (
            len(self._jobs) + len(self._outgoing_transfers) + len(self.local_decodes) + len(self.replica.served_fetches)
        )

    def take_tokens(self) -> dict[str, list[StreamToken]]:
        # First tokens of shipped prompts are sent in each prompt's own call.
        return self.local_decodes.take_tokens()

    def status(self) -> pb.Status:
        status = self.replica.status()
        status.running += len(self._outgoing_transfers)
        self.local_decodes.add_to(status)
        return status

    # One prompt, from its first step to its end.

    def _ships(self, key: HandoffKey) -> bool:
        """Return whether a handoff is or was used for a prompt."""
        waiting = (job.handoff.key for job in self._jobs.values() if job.handoff)
        return key in waiting or self._outgoing_transfers.knows(key)

    def _begin(self, prompt: Prompt, job: _Job) -> BeginOrder:
        assert job.handoff
        ranks = sending_ranks(self._gang.runner.layout, num_receivers=len(job.handoff.ranks))
        sequence = prompt.sequence
        job.outgoing = self._outgoing_transfers.begin(job.handoff, sequence.blocks, ranks=ranks, owner=prompt)
        return BeginOrder(job.handoff, sequence.blocks, sequence.num_computed)

    def _finish(self, prefilled: Prefilled) -> None:
        """Report the first tokens of a computed prompt, and commit its transfer."""
        prompt, job = prefilled.prompt, self._jobs[prefilled.prompt]
        job.listener.first_tokens(prefilled.tokens)
        if job.handoff:
            self._gang.commit(job.handoff.key, [token.token_id for token in prefilled.tokens])
        else:
            self._end(prompt, None, None)

    def _stop(self, prompt: Prompt, job: _Job, error: TransferError) -> None:
        """Stop a prompt. Its blocks are freed when no rank reads them."""
        self.replica.cancel(prompt)
        if job.outgoing:
            self._outgoing_transfers.abort(job.outgoing, error)

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
        self.replica.totals.transfers += 1
        self.replica.count_shipment(shipment)
        self.replica.link_rate.add(shipment.wire_bytes, shipment.link_s)

    def _end(self, prompt: Prompt, shipment: Shipment | None, error: ClusterError | None) -> None:
        if job := self._jobs.pop(prompt, None):
            job.listener.ended(shipment, error)
