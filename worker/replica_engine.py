"""A replica's engine, and what both roles do around it: prefixes that come and go, lower tiers, the other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from core.rpc import worker_pb2 as pb
from core.types.errors import ClusterError
from core.types.failpoint import FailpointStage
from core.types.handoff import PrefixSource
from core.types.tier import Tier
from core.wire.messages import timing_to_proto
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.runner.device_event import DeviceEvent
from engine.sampling.sampler import sample
from engine.scheduler.prompts import Prompt
from engine.scheduler.sequence import Sequence
from engine.scheduler.step import KVConnector, StepResult
from engine.scheduler.step_commands import Orders
from engine.spec_decode.draft_stats import RowYield
from engine.spec_decode.speculation import Speculation
from engine.spec_decode.suffix import Corpus
from engine.tiers.tiers import Tiers
from engine.timing.pace import HostEvent, Pace
from engine.timing.rate import Rate
from kvtransfer.protocol.fetches import PrefixFetches
from kvtransfer.protocol.rank_transfer import Shipment
from kvtransfer.transfer.serve_fetches import ServedFetches
from worker.fetches import Fetches
from worker.gang_runner import GangRunner
from worker.prompt_timing import PromptClock


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """What a replica's engine is put together from."""

    gang: GangRunner
    blocks: BlockManager
    limits: SchedulerConfig
    prefix_fetches: PrefixFetches[Prompt]
    served_fetches: ServedFetches
    tiers: Tiers[Prompt]

    def save_evicted(self) -> None:
        """What was evicted is copied to lower tiers, on every rank, before somebody writes to its block; and what is
        still to be put there is."""
        self.gang.runner.settle()
        if orders := self.tiers.table.take_orders():
            self.gang.execute(None, Orders(tiers=orders))


class ReplicaEngine:
    """Owned by the step thread of rank 0."""

    def __init__(
        self,
        parts: EngineParts,
        connector: KVConnector,
        *,
        speculation: Speculation | None = None,
        corpus: Corpus | None = None,
    ) -> None:
        """speculation: None to draft nothing. corpus: finished answers that it drafts from, if any."""
        block_size = parts.gang.runner.layout.block_size
        self.totals = pb.Totals()
        self.pace = Pace(DeviceEvent if parts.gang.runner.device.type == "cuda" else HostEvent)
        self.link_rate = Rate()  # bytes
        self._yield = RowYield()
        self.clock = PromptClock()
        self.engine: Engine[Tensor] = Engine(
            parts.gang,
            sample,
            parts.blocks,
            parts.limits,
            block_size=block_size,
            connector=connector,
            tier_orders=parts.tiers.table.take_orders,
            pace=self.pace,
            speculation=speculation,
            is_async=parts.gang.is_async,
        )
        self.fetches = Fetches(
            self.engine.prompts,
            parts.prefix_fetches,
            parts.served_fetches,
            parts.tiers,
            self.totals,
            block_size=block_size,
            on_incoming=self.note_arrival,
        )
        self.served_fetches = parts.served_fetches
        self._parts = parts
        self._gang = parts.gang
        self._blocks = parts.blocks
        self._tiers = parts.tiers
        self._speculation = speculation
        self._corpus = corpus

    def add(self, prompt: Prompt, prefix_source: PrefixSource | None) -> None:
        """Queue a prompt, of which `prefix_source` may hold more than is here. Raises what Engine.add does."""
        self._gang.failpoint(FailpointStage.QUEUED, prompt.id)
        try:
            if not (prompt.is_received or prompt.sequence.is_scored):
                self.fetches.offer(prompt, prefix_source, tokens_per_s=self.pace.prompt_tokens_per_s)
            self.engine.add(prompt)
        except ClusterError:
            self.fetches.forget(prompt)
            raise
        self.clock.queued(prompt)
        if not (prompt.is_received or prompt.fetch_only):
            self.totals.prompt_tokens += len(prompt.sequence.tokens)

    def cancel(self, prompt: Prompt) -> None:
        """Do no more for a prompt, which may be whole already."""
        self.clock.forget(prompt)
        self.fetches.cancel(prompt)
        self.engine.cancel(prompt)

    def step(self) -> StepResult:
        """One step of the engine, booked."""
        self.fetches.expire()
        result = self.engine.step()
        if result.sampled or result.prefilled:
            self._gang.failpoint(FailpointStage.SAMPLED, "")
        self.totals.computed_tokens += result.num_computed
        self.totals.generated_tokens += result.num_generated
        self.totals.forced_tokens += result.num_known
        if rows := result.num_rows:
            self._yield.add(rows, num_tokens=len(result.sampled), num_drafted=result.num_drafted)
        for sequence in result.failed:
            if not sequence.is_contradicted:
                self._tiers.table.forget(sequence.hashes())
        for prompt in result.fetched:
            self.clock.forget(prompt)
            self.fetches.forget(prompt)
        for prefilled in result.prefilled:
            self.note_whole(prefilled.prompt)
        return result

    def note_whole(self, prompt: Prompt) -> None:
        """The KV of a prompt is whole."""
        prompt.spent = self.clock.whole(prompt)
        self.fetches.forget(prompt)
        self.totals.prefix_hit_tokens += prompt.num_found

    def note_arrival(self, sequence: Sequence, first_token: int, end_token: int, features: bytes) -> None:
        """The KV of these positions has come from elsewhere, and with it what is known of the last of them there."""
        self._gang.arrived(sequence.blocks, first_token, end_token, features)

    def count_shipment(self, shipment: Shipment) -> None:
        """All ranks' of a handoff, or of a grant, that has landed."""
        self.totals.transfer_bytes += shipment.wire_bytes
        self.totals.transfer_seconds += shipment.seconds

    def orders(self) -> Orders:
        """What the ranks do for those who fetch prefixes from here."""
        return Orders(served_fetches=self.served_fetches.take_orders(), aborts=self.served_fetches.take_aborts())

    def save_evicted(self) -> None:
        """Before a peer may write to a block: what is opened on the other ranks waits for this step."""
        self._parts.save_evicted()

    def heartbeat(self) -> None:
        """Keep the other ranks from giving us up while there is nothing to do."""
        self._tiers.save_ahead()
        orders = self._tiers.table.take_orders()
        if orders or self._gang.has_others:
            self._gang.execute(None, Orders(tiers=orders))

    @property
    def token_s(self) -> float:
        """From one token of a choice that decodes here to its next one; 0: not measured yet."""
        return self.pace.decode_step_s / max(1.0, self._yield.tokens_per_row)

    @property
    def is_whole(self) -> bool:
        """Nobody holds a block, and nothing writes to one."""
        return self._blocks.num_available == self._blocks.num_blocks

    def stop(self) -> None:
        """Save what is worth it, and let the other ranks go."""
        self._tiers.save_ahead(is_last=True)
        self.let_ranks_go()

    def let_ranks_go(self) -> None:
        """They do what is left to do, and follow no more."""
        self._parts.save_evicted()
        if self._gang.has_others:
            self._gang.execute(None, Orders(stop=True))

    def take_changes(self) -> Mapping[bytes, Tier | None]:
        """Where the blocks are now whose place has changed since the last call, by prefix hash; None: gone."""
        return self._tiers.take_changes()

    def held(self) -> Mapping[bytes, Tier]:
        """Every block that the replica holds, by prefix hash, and where."""
        return self._tiers.table.held()

    def status(self) -> pb.Status:
        """Of the engine; the role adds what else it has."""
        engine, blocks = self.engine, self._blocks
        self.totals.preemptions = engine.decoding.num_preemptions
        status = pb.Status(
            running=engine.num_running + len(self.served_fetches),
            waiting=engine.num_waiting,
            queued_tokens=engine.num_queued_tokens,
            blocks_total=blocks.num_blocks,
            blocks_free=blocks.num_free,
            blocks_cached=blocks.num_cached,
            prefill_tokens_per_s=self.pace.prompt_tokens_per_s,
            link_bytes_per_s=self.link_rate.per_s,
            timing=timing_to_proto(self.pace.timing),
            tokens_per_row=self._yield.tokens_per_row,
            drafted_per_row=self._yield.drafted_per_row,
        )
        self._tell_tiers(status)
        self._tell_drafts()
        status.corpus_tokens = self._corpus.num_tokens if self._corpus else 0
        status.totals.CopyFrom(self.totals)
        return status

    def _tell_drafts(self) -> None:
        if self._speculation is None:
            return
        del self.totals.drafted[:]
        for method, counts in self._speculation.counts.items():
            places = range(max(counts.drafted, default=-1) + 1)
            drafted, accepted = ([count[place] for place in places] for count in (counts.drafted, counts.accepted))
            self.totals.drafted.add(method=method, tokens=drafted, accepted=accepted)

    def _tell_tiers(self, status: pb.Status) -> None:
        tiers, totals = self._tiers, self.totals
        totals.host_hit_tokens = tiers.hit_tokens(Tier.HOST)
        totals.disk_hit_tokens = tiers.hit_tokens(Tier.DISK)
        totals.host_saved_bytes = tiers.saved_bytes(Tier.HOST)
        totals.disk_saved_bytes = tiers.saved_bytes(Tier.DISK)
        totals.tier_losses = tiers.num_losses
        status.blocks_host = tiers.table.num_blocks(Tier.HOST)
        status.blocks_disk = tiers.table.num_blocks(Tier.DISK)
        status.host_bytes_per_s = tiers.table.bytes_per_s(Tier.HOST)
        status.disk_bytes_per_s = tiers.table.bytes_per_s(Tier.DISK)
