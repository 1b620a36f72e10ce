"""The decode step loop, on rank 0: admit, receive, step, sample, and hand every token on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from cluster.rpc import worker_pb2 as pb
from cluster.wire.messages import timing_to_proto
from cluster.words.errors import ClusterError, HandoffExpired, TransferError
from cluster.words.handoff import Handoff, Holder
from cluster.words.tier import Tier
from cluster.worker.fetches import Fetches
from cluster.worker.gang_runner import GangRunner
from cluster.worker.tier_parts import tell_tiers
from decode_worker.answers import Answers, GroupListener
from decode_worker.moves import MoveListener
from decode_worker.opening import opening_for, ticket_for
from engine.batch.batch import Batch
from engine.decode_scheduler import Scheduler
from engine.group import Group, Source
from engine.kv.block_manager import BlockManager
from engine.orders import Orders
from engine.pace import Pace
from engine.tiers.orders import LoadResult
from engine.tiers.tiers import Tiers
from kvtransfer.movers.grants import Grants
from kvtransfer.protocol.arrivals import Arrival, Arrivals, ReceivingEnd
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.passage import Shipment
from kvtransfer.protocol.pulls import Pull, Pulls

logger = logging.getLogger(__name__)


class Decoder:
    """All requests of one decode replica. Everything but the constructor runs on the step thread.

    `close_handoff` closes a handoff on the other ranks and then runs the command given, on this thread.
    """

    def __init__(
        self,
        rank: GangRunner,
        receiver: ReceivingEnd,
        blocks: BlockManager,
        scheduler: Scheduler,
        *,
        replica: str,
        addresses: list[str],
        handoff_s: float,
        close_handoff: Callable[[str, Callable[[], None]], None],
        pulls: Pulls[Group],
        grants: Grants,
        tiers: Tiers[Group],
    ) -> None:
        self.totals = pb.Totals()
        self._rank = rank
        self._blocks = blocks
        self._scheduler = scheduler
        self._replica = replica
        self._addresses = tuple(addresses)
        self._handoff_s = handoff_s
        self._awaited: dict[Group, Arrival[Group]] = {}  # whose KV comes from elsewhere
        self._arrivals: Arrivals[Group] = Arrivals(
            receiver, blocks, num_ranks=len(addresses), close_elsewhere=close_handoff
        )
        self._grants = grants
        self._tiers = tiers
        self._fetches = Fetches(
            scheduler,
            pulls,
            grants,
            tiers,
            self.totals,
            block_size=rank.runner.layout.block_size,
            sequence_of=lambda group: group.root,
            loaded_here=self._loaded_here,
        )
        self._answers = Answers(rank, blocks, scheduler, fetches=self._fetches, tiers=tiers, totals=self.totals)
        self._moves = self._answers.moves
        self._pace = Pace()

    # What the world asks for.

    def submit(self, group: Group, listener: GroupListener, *, holder: Holder | None = None) -> None:
        """Queue a request, of whose prompt `holder` may hold more than is here. An error goes to the listener."""
        try:
            if group.source is Source.HERE:
                self._fetches.offer(group, holder, tokens_per_s=self._pace.prompt_tokens_per_s)
            self._scheduler.add(group)
        except ClusterError as error:
            self._fetches.forget(group)
            listener.ended(error)
            return
        self._answers.add(group, listener)
        if group.source is Source.HERE:
            self.totals.prompt_tokens += len(group.root.tokens)

    def cancel(self, group: Group) -> None:
        """The lease has ended: free everything. It may have ended by itself already."""
        self.totals.cancelled += self._remove(group) is not None

    def stop_streams(self, router: str, streams: Iterable[int]) -> None:
        """These choices need no more tokens."""
        self._answers.stop_streams(router, streams)

    def landed(self, rank: int, landing: Landing) -> None:
        """The KV of a handoff, or of a prefix that we fetch, is whole on one rank."""
        self._fetches.landed(rank, landing)
        arrival = self._arrivals.landed(rank, landing)
        if arrival is None:
            return
        group = arrival.owner
        del self._awaited[group]
        root, tokens = group.root, arrival.next_tokens
        if group.source is Source.DECODE and len(root.tokens) + len(tokens) == arrival.num_tokens + 1:
            self._answers.resume(group, arrival)
        elif group.source is Source.PREFILL and len(tokens) == group.num_choices:
            root.computed(root.num_missing, self._blocks)
            self._answers.start(group, [(token, None) for token in tokens], epoch=arrival.epoch)
        else:
            self._fail(group, TransferError(f"{len(tokens)} tokens came along with {arrival.num_tokens} positions"))

    def loaded(self, rank: int, loaded: LoadResult) -> None:
        """One rank has brought back what it could of a prefix that lay in its lower tiers."""
        self._fetches.loaded(rank, loaded)

    def missed(self, pull: Pull[Group], reason: str) -> None:
        """Nothing comes of a pull."""
        self._fetches.missed(pull, reason)

    def migrate(self, router: str, stream: int, handoff: Handoff, listener: MoveListener) -> None:
        """Ship a choice to the replica that has made this handoff, if it is worth it."""
        choice = self._answers.find(router, stream)
        if choice and choice in self._scheduler.decoding:
            self._moves.begin(choice, handoff, listener, step_s=self._pace.decode_step_s)
        else:
            listener.stays("it does not decode here")

    def keep(self, router: str, stream: int) -> None:
        """Nobody waits any more for this choice to be moved."""
        if choice := self._answers.find(router, stream):
            self._moves.cancel(choice, "the move is not wanted any more")

    def shipped(self, rank: int, shipment: Shipment) -> None:
        """One of our ranks has nothing more to send for a handoff."""
        moved = self._moves.shipped(rank, shipment)
        granted = self._grants.shipped(rank, shipment)
        self.totals.migrations += moved is not None
        if whole := moved or granted:
            self.totals.transfer_bytes += whole.wire_bytes
            self.totals.transfer_seconds += whole.seconds

    # The step.

    def step(self) -> bool:
        """One step; False when there was nothing to do."""
        self._expire_arrivals()
        if admitted := self._scheduler.admit():
            self._save_evicted()
        for group in admitted:
            self._admitted(group)
        orders = self._orders()
        chosen = self._scheduler.schedule()
        orders.tiers = self._tiers.take_orders()
        if not chosen:
            self._pace.rest()
            if orders:
                self._rank.execute(None, orders)
            return bool(orders)
        rows = [choice.sequence.row(count) for choice, count in chosen]
        batch = Batch.of(rows, block_size=self._rank.runner.layout.block_size)
        self._pace.begin()
        logits = self._rank.execute(batch, orders)
        assert logits is not None
        self.totals.computed_tokens += batch.num_tokens - len(self._scheduler.decoding)
        for choice, count in chosen:
            choice.sequence.computed(count, self._blocks)
        self._answers.sample([choice for choice, _ in chosen if not choice.sequence.num_missing], logits)
        self._pace.end(batch)
        return True

    def heartbeat(self) -> None:
        """Keep the other ranks from giving us up while there is nothing to do, and watch what is on its way here."""
        self._expire_arrivals()
        self._tiers.save_ahead()
        orders = self._tiers.take_orders()
        if orders or self._rank.runner.parallel.size > 1:
            self._rank.execute(None, Orders(tiers=orders))

    def stop(self) -> None:
        self._tiers.save_ahead(is_last=True)
        if orders := self._tiers.take_orders():
            self._rank.execute(None, Orders(tiers=orders))
        if self._rank.runner.parallel.size > 1:
            self._rank.execute(None, Orders(stop=True))

    def _orders(self) -> Orders:
        """What the ranks must do in the next step beside its batch; false when there is nothing."""
        orders = Orders(grants=self._grants.take_orders(), aborts=self._grants.take_aborts())
        self._moves.add_to(orders)
        return orders

    # What the world is told.

    @property
    def num_requests(self) -> int:
        """Requests that live here, what is still being sent of those that have left, and prefixes that others fetch."""
        return len(self._answers) + len(self._moves) + len(self._grants)

    def take_tokens(self) -> dict[str, list[pb.StreamTokens]]:
        return self._answers.take_tokens()

    def take_changes(self) -> dict[bytes, Tier | None]:
        return self._tiers.take_changes()

    def held(self) -> dict[bytes, Tier]:
        return self._tiers.held()

    def status(self) -> pb.Status:
        self.totals.preemptions = self._scheduler.num_preemptions
        status = pb.Status(
            running=self._scheduler.num_running + self._moves.num_paused + len(self._grants),
            waiting=self._scheduler.num_waiting,
            queued_tokens=self._scheduler.num_queued_tokens,
            context_tokens=sum(len(choice.sequence.tokens) for choice in self._scheduler.decoding),
            blocks_total=self._blocks.num_blocks,
            blocks_free=self._blocks.num_free,
            blocks_cached=self._blocks.num_cached,
            prefill_tokens_per_s=self._pace.prompt_tokens_per_s,
            link_bytes_per_s=self._moves.link_rate.per_s,
            decode_step_s=self._pace.decode_step_s,
            timing=timing_to_proto(self._pace.timing),
        )
        tell_tiers(self._tiers, status, self.totals)
        return status

    # Below: one request from admission to its end.

    def _admitted(self, group: Group) -> None:
        listener = self._answers.listener(group)
        if group.source is Source.HERE:
            listener.reserved(None, None, group.num_cached)
            if group.fetch_end > group.num_cached:
                self._fetches.begin(group)
            return
        opening = opening_for(group, replica=self._replica)
        handoff = ticket_for(
            opening,
            replica=self._replica,
            addresses=self._addresses,
            layout=self._rank.runner.layout.fingerprint,
            ttl_s=self._handoff_s,
        )
        expires_at = time.monotonic() + self._handoff_s
        self._awaited[group] = self._arrivals.open(opening, owner=group, expires_at=expires_at)
        listener.reserved(handoff, opening, group.num_cached)

    def _save_evicted(self) -> None:
        """What was evicted is copied on every rank before a peer may write to its block."""
        if orders := self._tiers.take_orders():
            self._rank.execute(None, Orders(tiers=orders, meet=True))

    def _loaded_here(self, group: Group, num_tokens: int) -> None:
        self.totals.prefix_hit_tokens += num_tokens

    def _fail(self, group: Group, error: ClusterError) -> None:
        self.totals.transfer_failures += 1
        if listener := self._remove(group):
            listener.ended(error)

    def _remove(self, group: Group) -> GroupListener | None:
        """Give back everything that a request holds; its listener, if it lives here."""
        if arrival := self._awaited.pop(group, None):
            group.root.blocks = group.root.blocks[: group.num_cached // group.root.block_size]
            self._arrivals.give_up(arrival)
        return self._answers.remove(group)

    def _expire_arrivals(self) -> None:
        for arrival in self._arrivals.expired(time.monotonic()):
            self._fail(arrival.owner, HandoffExpired(f"handoff {arrival.id}: no KV came within {self._handoff_s} s"))
        self._fetches.expire()
