"""The prefill step loop, on rank 0: schedule, compute, hand each layer to the sender, sample, commit."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from cluster.errors import ClusterError, HandoffExpired, TransferError
from cluster.handoff import Handoff
from cluster.request import SampledToken
from cluster.rpc import worker_pb2 as pb
from engine.batch import Batch
from engine.block_manager import BlockManager
from engine.prefill_scheduler import Job, Scheduler
from engine.rate import Rate
from engine.sampler import SamplingRow, sample
from kvtransfer.plan import plan_heads
from kvtransfer.sender import Shipment
from prefill_worker.rank import Key, PrefillRank, begin_order

logger = logging.getLogger(__name__)


class JobListener(Protocol):
    """Who waits for a job. Called on the step thread."""

    def first_tokens(self, tokens: list[SampledToken], num_cached: int) -> None: ...

    def ended(self, shipment: Shipment | None, error: ClusterError | None) -> None:
        """Last, and once: the KV has landed (the shipment of all ranks together), or an error says why not."""
        ...


@dataclass
class _Shipping:
    """A job whose KV is on its way: our ranks that still send, and what the others came to."""

    job: Job
    ranks: set[int]
    done: list[Shipment] = field(default_factory=list)


class Prefiller:
    """All prompts of one prefill replica. Everything but the constructor runs on the step thread.

    A job's blocks are kept until every rank has finished sending them, whether it succeeded, failed or was aborted.
    """

    def __init__(self, rank: PrefillRank, blocks: BlockManager, scheduler: Scheduler) -> None:
        self.totals = pb.Totals()
        self._blocks = blocks
        self._scheduler = scheduler
        self._prefill_rate = Rate()
        self._link_rate = Rate()
        self._rank = rank
        self._listeners: dict[Job, JobListener] = {}
        self._shipping: dict[Key, _Shipping] = {}
        self._begins: list[Job] = []
        self._aborts: list[Key] = []

    @property
    def num_requests(self) -> int:
        """Jobs that wait, compute or ship."""
        return len(self._listeners) + len(self._shipping)

    def submit(self, job: Job, listener: JobListener) -> None:
        """Queue a job. An error goes to the listener."""
        try:
            if any(other.handoff and other.handoff == job.handoff for other in self._listeners):
                raise HandoffExpired(f"{job.id}: its handoff is under way already")
            self._scheduler.add(job)
        except ClusterError as error:
            listener.ended(None, error)
            return
        self._listeners[job] = listener
        self.totals.prompt_tokens += len(job.sequence.tokens)

    def cancel(self, job: Job) -> None:
        """Nobody waits for this job any more. It may have ended already."""
        if self._listeners.pop(job, None) is None:
            return
        self.totals.cancelled += 1
        self._scheduler.remove(job)
        if job.handoff and _key(job.handoff) in self._shipping:
            self._aborts.append(_key(job.handoff))  # its blocks come back when the ranks have stopped reading them
        else:
            job.sequence.release(self._blocks)

    def step(self) -> bool:
        """One step; False when there was nothing to do."""
        chosen = self._scheduler.schedule()
        begins = [job for job, _ in chosen if job.handoff and _key(job.handoff) not in self._shipping]
        orders = {
            "begin": [self._begin(job, job.handoff) for job in begins if job.handoff],
            "rows": [_key(job.handoff) if job.handoff else None for job, _ in chosen],
            "abort": self._aborts,
        }
        self._aborts = []
        if not chosen:
            if orders["abort"]:
                self._rank.lead(None, orders)
            return bool(orders["abort"])
        started = time.monotonic()
        rows = [job.sequence.row(count) for job, count in chosen]
        batch = Batch.of(rows, block_size=self._rank.runner.layout.block_size)
        logits = self._rank.lead(batch, orders)
        assert logits is not None
        self._prefill_rate.add(batch.num_tokens, time.monotonic() - started)
        self._finish([job for job, count in chosen if self._advance(job, count)], logits)
        return True

    def shipped(self, rank: int, shipment: Shipment) -> None:
        """One of our ranks has nothing more to send for a handoff."""
        key = (shipment.handoff, shipment.epoch)
        shipping = self._shipping.get(key)
        if shipping is None:
            return
        shipping.ranks.discard(rank)
        shipping.done.append(shipment)
        if shipment.error and shipping.job in self._listeners:
            self._fail(shipping.job, shipment.error)
        if not shipping.ranks:
            del self._shipping[key]
            self._landed(shipping)

    def heartbeat(self) -> None:
        """Keep the other ranks from giving us up while there is nothing to do."""
        if self._rank.runner.parallel.size > 1:
            self._rank.lead(None, {})

    def stop(self) -> None:
        """Let the other ranks go."""
        if self._rank.runner.parallel.size > 1:
            self._rank.lead(None, {"stop": True})

    def take_tokens(self) -> dict[str, list[pb.StreamTokens]]:
        return {}  # first tokens travel in each job's own call

    def take_changes(self) -> dict[bytes, bool]:
        return self._blocks.take_changes()

    def sealed_hashes(self) -> list[bytes]:
        return self._blocks.sealed_hashes()

    def status(self) -> pb.Status:
        return pb.Status(
            running=self._scheduler.num_running + len(self._shipping),
            waiting=self._scheduler.num_waiting,
            queued_tokens=self._scheduler.num_queued_tokens,
            blocks_total=self._blocks.num_blocks,
            blocks_free=self._blocks.num_free,
            blocks_cached=self._blocks.num_cached,
            prefill_tokens_per_s=self._prefill_rate.per_s,
            link_bytes_per_s=self._link_rate.per_s,
            totals=self.totals,
        )

    def _begin(self, job: Job, handoff: Handoff) -> dict[str, object]:
        layout = self._rank.runner.layout
        copies = plan_heads(sender=layout, receiver=replace(layout, tensor_parallel=len(handoff.ranks)))
        self._shipping[_key(handoff)] = _Shipping(job, {copy.sender for copy in copies})
        return begin_order(handoff, job.sequence.blocks, num_cached=job.num_cached)

    def _advance(self, job: Job, num_tokens: int) -> bool:
        """Book one chunk; True when the prompt is complete."""
        job.sequence.computed(num_tokens, self._blocks)
        return not job.sequence.num_missing

    def _finish(self, jobs: list[Job], logits: Tensor) -> None:
        """Prompts are complete: sample the first token of each of their choices, tell the listeners, commit."""
        rows = [SamplingRow.of(job.sequence, choice) for job in jobs for choice in job.sequence.request.choices]
        source = [i for i, job in enumerate(jobs) for _ in job.sequence.request.choices]
        sampled = iter(sample(logits[source], rows))
        for job in jobs:
            tokens = [next(sampled) for _ in job.sequence.request.choices]
            self.totals.generated_tokens += len(tokens)
            self.totals.prefix_hit_tokens += job.num_cached
            self._scheduler.remove(job)
            firsts = [job.sequence.peek(token_id, logprob) for token_id, logprob in tokens]
            if listener := self._listeners.get(job):
                listener.first_tokens(firsts, job.num_cached)
            if job.handoff:
                self._rank.commit(_key(job.handoff), [token.token_id for token in firsts])
            else:
                job.sequence.release(self._blocks)
                self._end(job, None, None)

    def _fail(self, job: Job, error: TransferError) -> None:
        """The handoff cannot succeed any more: stop what is still computing or sending for it."""
        self._scheduler.remove(job)
        assert job.handoff
        self._aborts.append(_key(job.handoff))
        self.totals.transfer_failures += 1
        self._end(job, None, error)

    def _landed(self, shipping: _Shipping) -> None:
        """Every rank is done: the blocks are ours again."""
        job, done = shipping.job, shipping.done
        job.sequence.release(self._blocks)
        whole = Shipment(
            handoff=done[0].handoff,
            epoch=done[0].epoch,
            wire_bytes=sum(shipment.wire_bytes for shipment in done),
            seconds=max(shipment.seconds for shipment in done),
        )
        self.totals.transfer_bytes += whole.wire_bytes
        if any(shipment.error for shipment in done):
            self._end(job, None, HandoffExpired(f"handoff {whole.handoff} was aborted"))
            return
        self.totals.transfers += 1
        self.totals.transfer_seconds += whole.seconds
        self._link_rate.add(whole.wire_bytes, whole.seconds)
        logger.info(
            "handoff done request=%s handoff=%s bytes=%d ms=%.1f",
            job.id,
            whole.handoff,
            whole.wire_bytes,
            whole.seconds * 1e3,
        )
        self._end(job, whole, None)

    def _end(self, job: Job, shipment: Shipment | None, error: ClusterError | None) -> None:
        if listener := self._listeners.pop(job, None):
            listener.ended(shipment, error)


def _key(handoff: Handoff) -> Key:
    return handoff.id, handoff.epoch
