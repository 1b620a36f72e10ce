"""The prefill step loop, on rank 0: schedule, compute, hand each layer to the sender, sample, commit."""

from __future__ import annotations

import logging
from typing import Protocol

from torch import Tensor

from cluster.rpc import worker_pb2 as pb
from cluster.wire.messages import timing_to_proto
from cluster.words.errors import ClusterError, HandoffExpired, TransferError
from cluster.words.handoff import Handoff, Holder
from cluster.words.request import SampledToken
from cluster.words.tier import Tier
from cluster.worker.fetches import Fetches
from cluster.worker.gang_runner import GangRunner
from cluster.worker.tier_parts import tell_tiers
from engine.batch.batch import Batch
from engine.kv.block_manager import BlockManager
from engine.orders import BeginOrder, Orders
from engine.pace import Pace
from engine.prefill_scheduler import Job, Scheduler
from engine.rate import Rate
from engine.sampler import SamplingRow, sample
from engine.tiers.orders import LoadResult
from engine.tiers.tiers import Tiers
from kvtransfer.movers.grants import Grants
from kvtransfer.protocol.departures import Departures
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.passage import Shipment
from kvtransfer.protocol.plan import sending_ranks
from kvtransfer.protocol.pulls import Pull, Pulls

logger = logging.getLogger(__name__)


class JobListener(Protocol):
    """Who waits for a job. Called on the step thread."""

    def first_tokens(self, tokens: list[SampledToken]) -> None: ...

    def ended(self, shipment: Shipment | None, error: ClusterError | None) -> None:
        """Last, and once: the KV has landed (the shipment of all ranks together), or an error says why not."""
        ...


class Prefiller:
    """All prompts of one prefill replica. Everything but the constructor runs on the step thread.

    A job holds its blocks while it is computed; its departure holds them until every rank has stopped reading them.
    """

    def __init__(
        self,
        rank: GangRunner,
        blocks: BlockManager,
        scheduler: Scheduler,
        *,
        pulls: Pulls[Job],
        grants: Grants,
        tiers: Tiers[Job],
    ) -> None:
        self.totals = pb.Totals()
        self._blocks = blocks
        self._scheduler = scheduler
        self._pace = Pace()
        self._link_rate = Rate()
        self._rank = rank
        self._grants = grants
        self._tiers = tiers
        self._fetches = Fetches(
            scheduler,
            pulls,
            grants,
            tiers,
            self.totals,
            block_size=rank.runner.layout.block_size,
            sequence_of=lambda job: job.sequence,
            loaded_here=_loaded_here,
        )
        self._listeners: dict[Job, JobListener] = {}
        self._departures: Departures[Job] = Departures(blocks)

    @property
    def num_requests(self) -> int:
        """Jobs that wait, compute or ship, and prefixes that others fetch."""
        return len(self._listeners) + len(self._departures) + len(self._grants)

    def submit(self, job: Job, listener: JobListener, *, holder: Holder | None = None) -> None:
        """Queue a job, of whose prompt `holder` may hold more than is here. An error goes to the listener."""
        try:
            if job.handoff and (self._is_known(job.handoff) or self._departures.knows(job.handoff.key)):
                raise HandoffExpired(f"{job.id}: its handoff is under way already, or was")
            self._fetches.offer(job, holder, tokens_per_s=self._pace.prompt_tokens_per_s)
            self._scheduler.add(job)
        except ClusterError as error:
            self._fetches.forget(job)
            listener.ended(None, error)
            return
        self._listeners[job] = listener
        self.totals.prompt_tokens += 0 if job.fetch_only else len(job.sequence.tokens)

    def cancel(self, job: Job) -> None:
        """Nobody waits for this job any more. It may have ended already."""
        if self._listeners.pop(job, None) is None:
            return
        self.totals.cancelled += 1
        self._stop(job, HandoffExpired(f"{job.id} is not wanted any more"))

    def step(self) -> bool:
        """One step; False when there was nothing to do."""
        self._fetches.expire()
        for job in self._scheduler.fetch():
            if self._fetches.is_pull(job):
                self._save_evicted()
            self._fetches.begin(job)
        for job in self._scheduler.take_fetched():
            self._fetches.forget(job)
            job.sequence.release(self._blocks)
            self._end(job, None, None)
        chosen = self._scheduler.schedule()
        orders = Orders(
            tiers=self._tiers.take_orders(),
            grants=self._grants.take_orders(),
            begins=[self._begin(job, job.handoff) for job, _ in chosen if job.handoff and job.departure is None],
            rows=[job.handoff and job.handoff.key for job, _ in chosen],
            aborts=self._departures.take_aborts() + self._grants.take_aborts(),
        )
        if not chosen:
            self._pace.rest()
            if orders:
                self._rank.execute(None, orders)
            return bool(orders)
        self._pace.begin()
        rows = [job.sequence.row(count) for job, count in chosen]
        batch = Batch.of(rows, block_size=self._rank.runner.layout.block_size)
        logits = self._rank.execute(batch, orders)
        assert logits is not None
        self.totals.computed_tokens += batch.num_tokens
        self._finish([job for job, count in chosen if self._advance(job, count)], logits)
        self._pace.end(batch)
        return True

    def shipped(self, rank: int, shipment: Shipment) -> None:
        """One of our ranks has nothing more to send for a handoff."""
        if granted := self._grants.shipped(rank, shipment):
            self._count(granted)
        departure = self._departures.ended(rank, shipment)
        if departure is None:
            return
        job = departure.owner
        if departure.error and job in self._listeners:
            self.totals.transfer_failures += 1
            self._stop(job, departure.error)
            self._end(job, None, departure.error)
        elif departure.is_over and not departure.error:
            self._landed(job, departure.shipment)

    def landed(self, rank: int, landing: Landing) -> None:
        """A prefix that we fetch is whole on one rank."""
        self._fetches.landed(rank, landing)

    def missed(self, pull: Pull[Job], reason: str) -> None:
        """Nothing comes of a pull."""
        self._fetches.missed(pull, reason)

    def loaded(self, rank: int, loaded: LoadResult) -> None:
        """One rank has brought back what it could of a prefix that lay in its lower tiers."""
        self._fetches.loaded(rank, loaded)

    def heartbeat(self) -> None:
        """Keep the other ranks from giving us up while there is nothing to do, and watch what is on its way here."""
        self._fetches.expire()
        self._tiers.save_ahead()
        orders = self._tiers.take_orders()
        if orders or self._rank.runner.parallel.size > 1:
            self._rank.execute(None, Orders(tiers=orders))

    def stop(self) -> None:
        """Let the other ranks go."""
        self._tiers.save_ahead(is_last=True)
        if orders := self._tiers.take_orders():
            self._rank.execute(None, Orders(tiers=orders))
        if self._rank.runner.parallel.size > 1:
            self._rank.execute(None, Orders(stop=True))

    def take_tokens(self) -> dict[str, list[pb.StreamTokens]]:
        return {}  # first tokens travel in each job's own call

    def take_changes(self) -> dict[bytes, Tier | None]:
        return self._tiers.take_changes()

    def held(self) -> dict[bytes, Tier]:
        return self._tiers.held()

    def status(self) -> pb.Status:
        status = pb.Status(
            running=self._scheduler.num_running + len(self._departures) + len(self._grants),
            waiting=self._scheduler.num_waiting,
            queued_tokens=self._scheduler.num_queued_tokens,
            blocks_total=self._blocks.num_blocks,
            blocks_free=self._blocks.num_free,
            blocks_cached=self._blocks.num_cached,
            prefill_tokens_per_s=self._pace.prompt_tokens_per_s,
            link_bytes_per_s=self._link_rate.per_s,
            timing=timing_to_proto(self._pace.timing),
        )
        tell_tiers(self._tiers, status, self.totals)
        return status

    def _begin(self, job: Job, handoff: Handoff) -> BeginOrder:
        layout = self._rank.runner.layout
        ranks = sending_ranks(layout, num_receivers=len(handoff.ranks))
        job.departure = self._departures.begin(handoff, job.sequence.blocks, ranks=ranks, owner=job)
        return BeginOrder(handoff, job.sequence.blocks, job.sequence.num_computed)

    def _save_evicted(self) -> None:
        """What was evicted is copied on every rank before a peer may write to its block."""
        if orders := self._tiers.take_orders():
            self._rank.execute(None, Orders(tiers=orders, meet=True))

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
            self._fetches.forget(job)
            firsts = [job.sequence.peek(token_id, logprob) for token_id, logprob in tokens]
            if listener := self._listeners.get(job):
                listener.first_tokens(firsts)
            job.sequence.release(self._blocks)
            if job.handoff:
                self._rank.commit(job.handoff.key, [token.token_id for token in firsts])
            else:
                self._end(job, None, None)

    def _stop(self, job: Job, error: TransferError) -> None:
        """Do no more for a job: its blocks come back when the ranks have stopped reading them."""
        self._scheduler.remove(job)
        self._fetches.cancel(job)
        job.sequence.release(self._blocks)
        if job.departure:
            self._departures.abort(job.departure, error)

    def _landed(self, job: Job, shipment: Shipment) -> None:
        """Every rank of the decode replica has all of it."""
        self._count(shipment)
        logger.info(
            "handoff done request=%s handoff=%s bytes=%d ms=%.1f",
            job.id,
            shipment.handoff,
            shipment.wire_bytes,
            shipment.seconds * 1e3,
        )
        self._end(job, shipment, None)

    def _count(self, shipment: Shipment) -> None:
        self.totals.transfers += 1
        self.totals.transfer_bytes += shipment.wire_bytes
        self.totals.transfer_seconds += shipment.seconds
        self._link_rate.add(shipment.wire_bytes, shipment.link_s)

    def _is_known(self, handoff: Handoff) -> bool:
        return any(job.handoff and job.handoff.key == handoff.key for job in self._listeners)

    def _end(self, job: Job, shipment: Shipment | None, error: ClusterError | None) -> None:
        if listener := self._listeners.pop(job, None):
            listener.ended(shipment, error)


def _loaded_here(job: Job, num_tokens: int) -> None:
    """What comes from a lower tier was here, and counts as found in the cache."""
    job.num_cached += num_tokens
    job.num_fetched = 0
