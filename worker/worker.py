"""Worker of a replica, common to both roles: its engine, requests, prefix fetches and lower tiers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from core.rpc import worker_pb2 as pb
from core.types.errors import ClusterError
from core.types.failpoint import FailpointStage
from core.types.handoff import Handoff, PrefixSource
from core.types.tier import Tier
from core.wire.messages import to_message
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.runner.streams import DeviceEvent
from engine.sampling.sampler import sample
from engine.scheduler.prompts import Prompt
from engine.scheduler.sequence import Sequence
from engine.scheduler.step import KVConnector, StepResult
from engine.scheduler.step_commands import Orders
from engine.spec_decode.acceptance_rates import RowYield
from engine.spec_decode.speculation import Speculation
from engine.spec_decode.suffix import Corpus
from engine.tiers.tiers import Tiers
from engine.timing.pace import HostEvent, Pace
from engine.timing.rate import Rate
from kvtransfer.protocol.incoming_transfers import PrefixFetches
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.rank_transfer import Shipment
from kvtransfer.transfer.serve_fetches import ServedFetches
from worker.answers import Answers, RequestListener
from worker.fetches import Fetches
from worker.gang_runner import GangRunner
from worker.migrations import MoveListener, Moves


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """Components of a replica's engine."""

    gang: GangRunner
    blocks: BlockManager
    limits: SchedulerConfig
    prefix_fetches: PrefixFetches[Prompt]
    served_fetches: ServedFetches
    tiers: Tiers[Prompt]

    def flush_copies(self) -> None:
        """Copy evicted blocks to lower tiers, and states to other slots, before a step or a peer overwrites them.

        Openings on other ranks wait for this step.
        """
        self.gang.runner.settle()
        orders = Orders(tiers=self.tiers.table.take_orders())
        if self.blocks.states:
            orders.state_copies = self.blocks.states.take_copies()
        if self.blocks.windows:
            orders.parts = self.blocks.windows.take_changes()
        if orders:
            self.gang.execute(None, orders)


class Worker(KVConnector, ABC):
    """Requests of one replica, on rank 0. All methods but the constructor run on the step thread.

    A role adds how KV enters and leaves: the methods of KVConnector, and `shipped`.
    """

    def __init__(
        self,
        parts: EngineParts,
        *,
        speculation: Speculation | None = None,
        corpus: Corpus | None = None,
    ) -> None:
        """speculation: None to draft nothing. corpus: finished answers to draft from, if any."""
        block_size = parts.gang.runner.layout.block_size
        self.totals = pb.Totals()
        self.pace = Pace(DeviceEvent if parts.gang.runner.device.type == "cuda" else HostEvent)
        self.link_rate = Rate()  # bytes/s
        self._yield = RowYield()
        self.engine: Engine[Tensor] = Engine(
            parts.gang,
            sample,
            parts.blocks,
            parts.limits,
            block_size=block_size,
            connector=self,
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
            on_incoming=self._note_arrival,
        )
        self.served_fetches = parts.served_fetches
        self.moves = Moves(
            parts.gang, parts.blocks, self.engine, self.link_rate, leave=lambda sequence: self.answers.end(sequence)
        )
        self.answers = Answers(self.engine, self.moves, cancel=self._cancel)
        self.gang = parts.gang
        self.parts = parts
        self._blocks = parts.blocks
        self.tiers = parts.tiers
        self._speculation = speculation
        self._corpus = corpus

    # Requests from the event loop.

    def submit(
        self, prompt: Prompt, router: str, listener: RequestListener, *, prefix_source: PrefixSource | None = None
    ) -> None:
        """Queue a request to decode. `prefix_source` may have a longer cached prefix. Errors go to the listener."""
        try:
            self._add(prompt, prefix_source)
        except ClusterError as error:
            listener.ended(error)
            return
        self.answers.add(prompt, router, listener)

    def cancel(self, prompt: Prompt) -> None:
        """Free a request whose lease, the gRPC call, has ended. Does nothing if it is unknown."""
        self.totals.cancelled += self._remove(prompt) is not None

    def migrate(self, router: str, stream: int, handoff: Handoff, listener: MoveListener) -> None:
        """Migrate a choice to the replica that issued the handoff, if that is faster than decoding it here."""
        sequence = self.answers.find(router, stream)
        if sequence and sequence in self.engine.decoding.running:
            step_s = self.pace.decode_step_s / max(1.0, self._yield.tokens_per_row)
            self.moves.begin(sequence, handoff, listener, step_s=step_s)
        else:
            listener.stays("choice is not decoding on this replica")

    def cancel_move(self, router: str, stream: int) -> None:
        if sequence := self.answers.find(router, stream):
            self.moves.cancel(sequence, "the migration was cancelled")

    # Results of transfers, one rank at a time.

    def landed(self, rank: int, landing: Landing) -> None:
        """Record that a handoff or a fetched prefix has landed on one rank."""
        self.fetches.landed(rank, landing)

    @abstractmethod
    def shipped(self, rank: int, shipment: Shipment) -> None:
        """Record that one rank has ended its part of a handoff."""

    # Steps.

    def step(self) -> bool:
        """Run one step. Returns False if there was nothing to do."""
        self._expire()
        result = self.engine.step()
        self._count_step(result)
        self._take(result)
        return result.did_work

    # Results for the event loop, and the end of the replica.

    @property
    def num_requests(self) -> int:
        """Number of requests, transfers and served fetches in progress."""
        return len(self.answers) + len(self.moves) + len(self.served_fetches)

    def heartbeat(self) -> None:
        """Send an empty step while idle, so that the other ranks do not time out."""
        self.tiers.save_ahead()
        orders = self.tiers.table.take_orders()
        if orders or self.gang.has_others:
            self.gang.execute(None, Orders(tiers=orders))

    @property
    def is_whole(self) -> bool:
        """Return whether every block, part and state slot is free or cached: none is referenced or quarantined."""
        states, windows = self._blocks.states, self._blocks.windows
        if windows and (windows.num_held or windows.num_reserved):
            return False
        has_states = states is None or states.num_available == states.num_slots
        return has_states and self._blocks.num_available == self._blocks.num_blocks

    def stop(self) -> None:
        """Save valuable blocks to lower tiers, then stop the other ranks."""
        self.tiers.save_ahead(is_last=True)
        self.stop_ranks()

    def stop_ranks(self) -> None:
        """Flush pending orders and stop the other ranks."""
        self.parts.flush_copies()
        if self.gang.has_others:
            self.gang.execute(None, Orders(stop=True))

    def status(self) -> pb.Status:
        """Return the replica's status. The role adds its own fields."""
        engine, blocks = self.engine, self._blocks
        num_available = blocks.num_usable
        num_cached = min(blocks.num_cached, num_available)
        self.totals.preemptions = engine.decoding.num_preemptions
        status = pb.Status(
            running=engine.num_running + len(self.served_fetches) + self.moves.num_paused,
            waiting=engine.num_waiting,
            queued_tokens=engine.num_queued_tokens,
            blocks_total=blocks.num_blocks,
            blocks_free=num_available - num_cached,
            blocks_cached=num_cached,
            prefill_tokens_per_s=self.pace.prompt_tokens_per_s,
            link_bytes_per_s=self.link_rate.per_s,
            timing=to_message(pb.StepTiming, timing) if (timing := self.pace.timing) else None,
            tokens_per_row=self._yield.tokens_per_row,
            drafted_per_row=self._yield.drafted_per_row,
        )
        add_slots(status, blocks)
        self._add_tiers(status)
        self._count_drafts()
        status.corpus_tokens = self._corpus.num_tokens if self._corpus else 0
        status.totals.CopyFrom(self.totals)
        return status

    # Parts of the roles' methods.

    def _add(self, prompt: Prompt, prefix_source: PrefixSource | None) -> None:
        """Queue a prompt. `prefix_source` may have a longer cached prefix. Raises as Engine.add does."""
        self.gang.failpoint(FailpointStage.QUEUED, prompt.id)
        try:
            if not (prompt.is_received or prompt.sequence.is_scored):
                self.fetches.offer(prompt, prefix_source, tokens_per_s=self.pace.prompt_tokens_per_s)
            self.engine.add(prompt)
        except ClusterError:
            self.fetches.forget(prompt)
            raise
        if not (prompt.is_received or prompt.fetch_only):
            self.totals.prompt_tokens += len(prompt.sequence.tokens)

    def _remove(self, prompt: Prompt) -> RequestListener | None:
        """Free everything that a request holds. Returns its listener, or None if it is unknown."""
        return self.answers.remove(prompt)

    def _cancel(self, prompt: Prompt) -> None:
        """Cancel a prompt. It may be complete already."""
        self.fetches.cancel(prompt)
        self.engine.cancel(prompt)

    def _expire(self) -> None:
        """Give up transfers past their deadline, before a step."""
        self.fetches.expire()

    def _count_step(self, result: StepResult) -> None:
        """Update the totals, and forget the prompts that are complete."""
        if result.sampled or result.prefilled:
            self.gang.failpoint(FailpointStage.SAMPLED, "")
        self.totals.computed_tokens += result.num_computed
        self.totals.generated_tokens += len(result.sampled) + sum(len(one.tokens) for one in result.prefilled)
        self.totals.forced_tokens += result.num_known
        if rows := result.num_rows:
            self._yield.add(rows, num_tokens=len(result.sampled), num_drafted=result.num_drafted)
        for sequence in result.failed:
            if not sequence.is_contradicted:
                self.tiers.table.forget(sequence.hashes())
        for prompt in result.fetched:
            self.fetches.forget(prompt)
        for prefilled in result.prefilled:
            self._note_whole(prefilled.prompt)

    def _take(self, result: StepResult) -> None:
        """Distribute the results of a step."""
        self.answers.take(result)

    def _note_whole(self, prompt: Prompt) -> None:
        """Record that a prompt's KV is complete."""
        prompt.spent = prompt.times.whole()
        self.fetches.forget(prompt)
        self.totals.prefix_hit_tokens += prompt.num_found

    def _note_arrival(self, sequence: Sequence, first_token: int, end_token: int, features: bytes) -> None:
        """Record that KV of these positions was received, with the features of the last position."""
        self.gang.arrived(sequence.blocks, first_token, end_token, features)

    def _count_shipment(self, shipment: Shipment) -> None:
        """Count the combined shipment of a landed handoff or served fetch."""
        self.totals.transfer_bytes += shipment.wire_bytes
        self.totals.transfer_seconds += shipment.seconds

    def _shipped_move(self, rank: int, shipment: Shipment) -> None:
        """Record that one rank has ended its part of a migration, if the handoff is one."""
        if moved := self.moves.shipped(rank, shipment):
            self.totals.migrations += 1
            self._count_shipment(moved)

    def _common_orders(self) -> Orders:
        """Return the orders for served fetches."""
        return Orders(served_fetches=self.served_fetches.take_orders(), aborts=self.served_fetches.take_aborts())

    def _add_decoding(self, status: pb.Status) -> None:
        status.context_tokens = sum(len(sequence.tokens) for sequence in self.engine.decoding.running)
        status.decode_step_s = self.pace.decode_step_s

    def _count_drafts(self) -> None:
        if self._speculation is None:
            return
        del self.totals.drafted[:]
        for method, counts in self._speculation.counts.items():
            places = range(max(counts.drafted, default=-1) + 1)
            drafted, accepted = ([count[place] for place in places] for count in (counts.drafted, counts.accepted))
            self.totals.drafted.add(method=method, tokens=drafted, accepted=accepted)

    def _add_tiers(self, status: pb.Status) -> None:
        tiers, totals = self.tiers, self.totals
        totals.host_hit_tokens = tiers.hit_tokens(Tier.HOST)
        totals.disk_hit_tokens = tiers.hit_tokens(Tier.DISK)
        totals.host_saved_bytes = tiers.saved_bytes(Tier.HOST)
        totals.disk_saved_bytes = tiers.saved_bytes(Tier.DISK)
        totals.tier_losses = tiers.num_losses
        status.blocks_host = tiers.table.num_blocks(Tier.HOST)
        status.blocks_disk = tiers.table.num_blocks(Tier.DISK)
        status.host_bytes_per_s = tiers.table.bytes_per_s(Tier.HOST)
        status.disk_bytes_per_s = tiers.table.bytes_per_s(Tier.DISK)


def add_slots(status: pb.Status, blocks: BlockManager) -> None:
    """Add the slots other than blocks: states of recurrent layers, or parts of layers with a window."""
    if states := blocks.states:
        status.states, status.checkpoints = states.num_slots, states.num_checkpoints
    if windows := blocks.windows:
        status.window_parts, status.window_parts_cached = windows.num_parts - 1, windows.num_cached
