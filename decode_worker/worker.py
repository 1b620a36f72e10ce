"""The decode step loop, on rank 0: admit, receive, step, sample, and hand every token on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

from torch import Tensor

from cluster.errors import ClusterError, HandoffExpired, TransferError
from cluster.handoff import Handoff, Holder
from cluster.messages import timing_to_proto, tokens_to_proto
from cluster.request import SampledToken, TokenLogprob
from cluster.rpc import transfer_pb2
from cluster.rpc import worker_pb2 as pb
from cluster.tier import Tier
from decode_worker.moves import MoveListener, Moves
from decode_worker.opening import opening_for, ticket_for
from decode_worker.rank import DecodeRank
from engine.batch import Batch
from engine.block_manager import BlockManager
from engine.decode_scheduler import Scheduler
from engine.group import Choice, Group, Source
from engine.learnt_timing import LearntTiming
from engine.rate import Rate
from engine.sampler import SamplingRow, sample
from engine.sequence import Sequence
from engine.step_message import Orders
from engine.tiers.orders import Loaded
from engine.tiers.tiers import Tiers
from kvtransfer.arrivals import Arrival, Arrivals, Gate
from kvtransfer.fetches import Fetches
from kvtransfer.grants import Grants
from kvtransfer.ledger import Landing
from kvtransfer.passage import Shipment
from kvtransfer.pulls import Pull, Pulls
from kvtransfer.tier_parts import tell_tiers

logger = logging.getLogger(__name__)


class GroupListener(Protocol):
    """Who holds the lease of a request. Called on the step thread."""

    def reserved(self, handoff: Handoff | None, opening: transfer_pb2.OpenRequest | None, num_cached: int) -> None:
        """Blocks are set aside. With a handoff, the other ranks must open it too before anyone is told of it."""
        ...

    def started(self, num_tokens: int, *, epoch: int, num_pulled: int) -> None:
        """Decoding has begun; the first token that is sent from here has position num_tokens."""
        ...

    def ended(self, error: ClusterError | None) -> None:
        """Last, and once."""
        ...


class Decoder:
    """All requests of one decode replica. Everything but the constructor runs on the step thread.

    `close_handoff` closes a handoff on the other ranks and then runs the command given, on this thread.
    """

    def __init__(
        self,
        rank: DecodeRank,
        gate: Gate,
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
        self._listeners: dict[Group, GroupListener] = {}
        self._awaited: dict[Group, Arrival[Group]] = {}  # whose KV comes from elsewhere
        self._arrivals: Arrivals[Group] = Arrivals(
            gate, blocks, num_ranks=len(addresses), close_elsewhere=close_handoff
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
        self._moves = Moves(rank, blocks, pause=scheduler.remove_choice, resume=scheduler.start, leave=self._end_choice)
        self._tokens: dict[str, list[pb.StreamTokens]] = {}
        self._step_rate = Rate()
        self._prefill_rate = Rate()
        self._timing = LearntTiming()
        self._stepped_at: float | None = None  # the end of the step before, where this one follows at once

    # What the world asks for.

    def submit(self, group: Group, listener: GroupListener, *, holder: Holder | None = None) -> None:
        """Queue a request, of whose prompt `holder` may hold more than is here. An error goes to the listener."""
        try:
            if group.source is Source.HERE:
                self._fetches.offer(group, holder, tokens_per_s=self._prefill_rate.per_s)
            self._scheduler.add(group)
        except ClusterError as error:
            self._fetches.forget(group)
            listener.ended(error)
            return
        self._listeners[group] = listener
        if group.source is Source.HERE:
            self.totals.prompt_tokens += len(group.root.tokens)

    def cancel(self, group: Group) -> None:
        """The lease has ended: free everything. It may have ended by itself already."""
        if self._listeners.pop(group, None):
            self.totals.cancelled += 1
            self._free(group)

    def stop_streams(self, router: str, streams: Iterable[int]) -> None:
        """These choices need no more tokens."""
        for group in [group for group in self._listeners if group.router == router]:
            group.unwanted.update(streams)  # it may not have started yet
            for choice in [choice for choice in group.choices if choice.stream in group.unwanted]:
                self._end_choice(choice)

    def landed(self, rank: int, landing: Landing) -> None:
        """The KV of a handoff, or of a prefix that we fetch, is whole on one rank."""
        self._fetches.landed(rank, landing)
        arrival = self._arrivals.landed(rank, landing)
        if arrival is None:
            return
        group = arrival.owner
        del self._awaited[group]
        if group.source is Source.DECODE:
            self._continue(group, arrival)
        elif len(arrival.next_tokens) == group.num_choices:
            group.root.computed(group.root.num_missing, self._blocks)
            self._start(group, [(token, None) for token in arrival.next_tokens], epoch=arrival.epoch)
        else:
            self._fail(group, TransferError(f"{len(arrival.next_tokens)} tokens came for {group.num_choices} choices"))

    def loaded(self, rank: int, loaded: Loaded) -> None:
        """One rank has brought back what it could of a prefix that lay in its lower tiers."""
        self._fetches.loaded(rank, loaded)

    def missed(self, pull: Pull[Group], reason: str) -> None:
        """Nothing comes of a pull."""
        self._fetches.missed(pull, reason)

    def migrate(self, router: str, stream: int, handoff: Handoff, listener: MoveListener) -> None:
        """Ship a choice to the replica that has made this handoff, if it is worth it."""
        choice = self._find(router, stream)
        if choice and choice in self._scheduler.decoding:
            self._moves.begin(choice, handoff, listener, step_s=self._step_s)
        else:
            listener.stays("it does not decode here")

    def keep(self, router: str, stream: int) -> None:
        """Nobody waits any more for this choice to be moved."""
        if choice := self._find(router, stream):
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
        if saves := self._tiers.take_orders():
            orders["tiers"] = saves
        if not chosen:
            self._stepped_at = None
            if orders:
                self._rank.lead(None, orders)
            return bool(orders)
        rows = [choice.sequence.row(count) for choice, count in chosen]
        batch = Batch.of(rows, block_size=self._rank.runner.layout.block_size)
        started = self._stepped_at or time.monotonic()
        logits = self._rank.lead(batch, orders)
        assert logits is not None
        self.totals.computed_tokens += batch.num_tokens - len(self._scheduler.decoding)
        for choice, count in chosen:
            choice.sequence.computed(count, self._blocks)
        self._sample([choice for choice, _ in chosen if not choice.sequence.num_missing], logits)
        self._stepped_at = time.monotonic()
        self._measure(batch, len(chosen), self._stepped_at - started)
        return True

    def heartbeat(self) -> None:
        """Keep the other ranks from giving us up while there is nothing to do, and watch what is on its way here."""
        self._expire_arrivals()
        self._tiers.save_ahead()
        orders = self._tiers.take_orders()
        if orders or self._rank.runner.parallel.size > 1:
            self._rank.lead(None, {"tiers": orders})

    def stop(self) -> None:
        self._tiers.save_ahead(is_last=True)
        if orders := self._tiers.take_orders():
            self._rank.lead(None, {"tiers": orders})
        if self._rank.runner.parallel.size > 1:
            self._rank.lead(None, {"stop": True})

    def _orders(self) -> Orders:
        """What the ranks must do in the next step beside its batch; empty when there is nothing."""
        orders = self._moves.orders()
        if aborts := self._grants.take_aborts():
            orders["abort"] = orders.get("abort", []) + aborts
        if grants := self._grants.take_orders():
            orders["grant"] = grants
        return orders

    # What the world is told.

    @property
    def num_requests(self) -> int:
        """Requests that live here, what is still being sent of those that have left, and prefixes that others fetch."""
        return len(self._listeners) + len(self._moves) + len(self._grants)

    def take_tokens(self) -> dict[str, list[pb.StreamTokens]]:
        tokens, self._tokens = self._tokens, {}
        return tokens

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
            prefill_tokens_per_s=self._prefill_rate.per_s,
            link_bytes_per_s=self._moves.link_rate.per_s,
            decode_step_s=self._step_s,
            timing=timing_to_proto(self._timing.timing),
        )
        tell_tiers(self._tiers, status, self.totals)
        return status

    # Below: one request from admission to its end.

    def _admitted(self, group: Group) -> None:
        listener = self._listeners[group]
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
            self._rank.lead(None, {"tiers": orders, "meet": True})

    def _loaded_here(self, group: Group, num_tokens: int) -> None:
        self.totals.prefix_hit_tokens += num_tokens

    def _continue(self, group: Group, arrival: Arrival[Group]) -> None:
        """A sequence has come from another decode replica, with the tokens that it got on the way."""
        root = group.root
        if len(root.tokens) + len(arrival.next_tokens) != arrival.num_tokens + 1:
            self._fail(group, TransferError(f"{arrival.num_tokens} positions came with other tokens than theirs"))
            return
        self.totals.prefix_hit_tokens += group.num_cached
        root.tokens += arrival.next_tokens
        root.computed(arrival.num_tokens - root.num_computed, self._blocks)
        self._scheduler.ready(group)
        group.choices = [Choice(group, root, root.request.stream)]
        self._listeners[group].started(len(root.tokens), epoch=arrival.epoch, num_pulled=0)
        if root.request.stream in group.unwanted:
            self._end_choice(group.choices[0])
        else:
            self._scheduler.start(group.choices[0])

    def _start(self, group: Group, first_tokens: list[tuple[int, TokenLogprob | None]], *, epoch: int = 0) -> None:
        """The prompt's KV is whole and each choice has its first token: fork, and decode those that go on."""
        request = group.root.request
        self._scheduler.ready(group)
        sequences = [group.root, *self._fork(group.root, request.choices[1:])]
        group.choices = [Choice(group, sequence, request.stream + i) for i, sequence in enumerate(sequences)]
        is_told = group.source is Source.PREFILL  # the prefill replica has told the router of the first tokens
        self._listeners[group].started(len(group.root.tokens) + is_told, epoch=epoch, num_pulled=group.num_fetched)
        self._fetches.forget(group)
        self.totals.prefix_hit_tokens += group.num_cached
        for choice, (token_id, logprob) in zip(list(group.choices), first_tokens, strict=True):
            token = choice.sequence.append(token_id, logprob)
            if not is_told:
                self._emit(choice, token)
            if token.finish_reason or choice.stream in group.unwanted:
                self._end_choice(choice)
            else:
                self._scheduler.start(choice)

    def _fork(self, root: Sequence, indices: Seq[int]) -> list[Sequence]:
        """The other choices of a request. One for which no block is left starts without any, and is computed again."""
        forks = [(index, root.fork(index, self._blocks)) for index in indices]
        copies = [fork[1] for _, fork in forks if fork and fork[1]]
        if copies:
            self._rank.lead(None, {"tiers": self._tiers.take_orders(), "copy": copies})
        return [fork[0] if fork else root.without_blocks(index) for index, fork in forks]

    def _sample(self, ready: list[Choice], logits_RV: Tensor) -> None:
        """Choose the next token of every row that is ready; a prompt that is new has one row for all its choices."""
        rows, source = [], []
        for i, choice in enumerate(ready):
            wanted = [choice.sequence.choice] if choice.group.choices else choice.sequence.request.choices
            rows += [SamplingRow.of(choice.sequence, index) for index in wanted]
            source += [i] * len(wanted)
        sampled = sample(logits_RV[source] if len(rows) > len(ready) else logits_RV, rows)
        self.totals.generated_tokens += len(sampled)
        for i, choice in enumerate(ready):
            tokens = [token for token, row in zip(sampled, source, strict=True) if row == i]
            if not choice.group.choices:
                self._start(choice.group, tokens)
            else:
                self._advance(choice, *tokens[0])

    def _advance(self, choice: Choice, token_id: int, logprob: TokenLogprob | None) -> None:
        token = choice.sequence.append(token_id, logprob)
        self._emit(choice, token)
        if token.finish_reason:
            self._end_choice(choice)
        else:
            self._scheduler.start(choice)

    def _emit(self, choice: Choice, token: SampledToken) -> None:
        tokens = pb.StreamTokens(stream=choice.stream, tokens=tokens_to_proto([token]))
        self._tokens.setdefault(choice.group.router, []).append(tokens)

    def _end_choice(self, choice: Choice) -> None:
        group = choice.group
        self._moves.cancel(choice, "it has ended")
        self._scheduler.remove_choice(choice)
        choice.sequence.release(self._blocks)
        group.choices.remove(choice)
        if not group.choices:
            self._listeners.pop(group).ended(None)

    def _free(self, group: Group) -> None:
        """Give back everything that a request holds, in whatever state it is."""
        for choice in group.choices:
            self._moves.cancel(choice, "it has ended")
        self._scheduler.remove(group)
        self._fetches.cancel(group)
        if arrival := self._awaited.pop(group, None):
            group.root.blocks = group.root.blocks[: group.num_cached // group.root.block_size]
            self._arrivals.give_up(arrival)
        for sequence in [choice.sequence for choice in group.choices] or [group.root]:
            sequence.release(self._blocks)
        group.choices = []

    def _fail(self, group: Group, error: ClusterError) -> None:
        self.totals.transfer_failures += 1
        listener = self._listeners.pop(group)
        self._free(group)
        listener.ended(error)

    def _expire_arrivals(self) -> None:
        for arrival in self._arrivals.expired(time.monotonic()):
            self._fail(arrival.owner, HandoffExpired(f"handoff {arrival.id}: no KV came within {self._handoff_s} s"))
        self._fetches.expire()

    def _find(self, router: str, stream: int) -> Choice | None:
        groups = (group for group in self._listeners if group.router == router)
        return next((choice for group in groups for choice in group.choices if choice.stream == stream), None)

    @property
    def _step_s(self) -> float:
        """0: not yet measured."""
        return 1 / self._step_rate.per_s if self._step_rate.per_s else 0.0

    def _measure(self, batch: Batch, num_rows: int, seconds: float) -> None:
        """Learn our rates: of steps that only decode, and of tokens in steps that also compute prompts."""
        self._timing.saw(batch, seconds)
        if batch.num_tokens == num_rows:
            self._step_rate.add(1, seconds)
        else:
            self._prefill_rate.add(batch.num_tokens, seconds)
