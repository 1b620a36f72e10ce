"""Decode worker on rank 0: receives prompts and emits every token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from core.rpc import worker_pb2 as pb
from core.types.errors import ClusterError, HandoffExpired, TransferError
from core.types.handoff import Handoff, PrefixSource
from core.types.step_timing import PromptSpent
from core.wire.frames import StreamToken
from decode_worker.ticket import ticket_for
from engine.scheduler.prompts import Prompt
from engine.scheduler.step import ScheduledStep
from engine.scheduler.step_commands import Orders
from engine.spec_decode.speculation import Speculation
from engine.spec_decode.suffix import Corpus
from kvtransfer.protocol.frames import Opening
from kvtransfer.protocol.incoming_transfers import IncomingTransfer, IncomingTransfers, ReceivingEnd
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.rank_transfer import Shipment
from worker.answers import Answers, RequestListener
from worker.migrations import MoveListener, Moves
from worker.replica_engine import EngineParts, ReplicaEngine


class DecodeWorker:
    """Requests of one decode replica. All methods but the constructor run on the step thread.

    `close_handoff` closes a handoff on the other ranks and then runs its callback on this thread.
    """

    def __init__(
        self,
        parts: EngineParts,
        receiver: ReceivingEnd,
        *,
        name: str,
        addresses: list[str],
        handoff_s: float,
        close_handoff: Callable[[str, Callable[[], None]], None],
        speculation: Speculation | None = None,
        corpus: Corpus | None = None,
    ) -> None:
        self.replica = ReplicaEngine(parts, self, speculation=speculation, corpus=corpus)
        self._name = name
        self._addresses = tuple(addresses)
        self._layout = parts.gang.runner.layout.fingerprint
        self._vocab_size = parts.gang.runner.config.vocab_size
        self._handoff_s = handoff_s
        self._awaited: dict[Prompt, IncomingTransfer[Prompt]] = {}  # prompts that wait for KV
        self._incoming_transfers: IncomingTransfers[Prompt] = IncomingTransfers(
            receiver, parts.blocks, num_ranks=len(addresses), close_elsewhere=close_handoff
        )
        engine, rate = self.replica.engine, self.replica.link_rate
        self._moves = Moves(parts.gang, parts.blocks, engine, rate, leave=lambda sequence: self._answers.end(sequence))
        self._answers = Answers(self.replica, self._moves)
        self._orders = Orders()  # for the next step

    # Requests from the event loop.

    def submit(
        self, prompt: Prompt, router: str, listener: RequestListener, *, prefix_source: PrefixSource | None = None
    ) -> None:
        """Queue a request. `prefix_source` may have a longer cached prefix. Errors go to the listener."""
        try:
            self.replica.add(prompt, prefix_source)
        except ClusterError as error:
            listener.ended(error)
            return
        self._answers.add(prompt, router, listener)

    def cancel(self, prompt: Prompt) -> None:
        """Free a request whose lease has ended. Does nothing if it is unknown."""
        self.replica.totals.cancelled += self._remove(prompt) is not None

    def stop_streams(self, router: str, streams: Iterable[int]) -> None:
        """Stop these choices."""
        self._answers.stop_streams(router, streams)

    def landed(self, rank: int, landing: Landing) -> None:
        """Record that a handoff or a fetched prefix has landed on one rank."""
        self.replica.fetches.landed(rank, landing)
        incoming = self._incoming_transfers.landed(rank, landing)
        if incoming is None:
            return
        prompt, num_tokens, next_tokens = incoming.owner, incoming.num_tokens, incoming.next_tokens
        del self._awaited[prompt]
        sequence, vocab_size = prompt.sequence, self._vocab_size
        if prompt.is_running_elsewhere:
            is_whole = len(sequence.tokens) + len(next_tokens) == num_tokens + 1
            is_whole &= num_tokens <= len(sequence.blocks) * sequence.block_size
        else:
            is_whole = len(next_tokens) == len(prompt.choices)
        is_whole &= all(0 <= token < vocab_size for token in next_tokens)
        if is_whole:
            self.replica.note_arrival(sequence, prompt.num_cached, num_tokens, incoming.features)
            prefilled = self.replica.engine.landed(prompt, num_tokens, next_tokens)
            self.replica.note_whole(prompt)
            self._answers.start(prefilled, epoch=incoming.epoch)
        else:
            self._fail(
                prompt,
                TransferError(
                    f"received {num_tokens} positions with {len(next_tokens)} invalid next tokens, starting "
                    f"{list(next_tokens)[:4]}"
                ),
            )

    def migrate(self, router: str, stream: int, handoff: Handoff, listener: MoveListener) -> None:
        """Migrate a choice to the replica that issued the handoff, if that is faster than decoding it here."""
        self._answers.migrate(router, stream, handoff, listener)

    def cancel_move(self, router: str, stream: int) -> None:
        """Cancel the migration of a choice."""
        self._answers.cancel_move(router, stream)

    def shipped(self, rank: int, shipment: Shipment) -> None:
        """Record that one rank has ended its part of a handoff."""
        moved = self._moves.shipped(rank, shipment)
        granted = self.replica.served_fetches.shipped(rank, shipment)
        self.replica.totals.migrations += moved is not None
        if whole := moved or granted:
            self.replica.count_shipment(whole)

    # Steps.

    def step(self) -> bool:
        """Run one step. Returns False if there was nothing to do."""
        self._expire_incoming_transfers()
        result = self.replica.step()
        self._answers.take(result)
        return result.did_work

    def begin_step(self, admitted: Seq[Prompt]) -> None:
        """Prepare a step. Implements KVConnector, as does `orders`."""
        if admitted:
            self.replica.save_evicted()
        for prompt in admitted:
            self._admitted(prompt)
        self._orders = self.replica.orders()
        self._moves.add_to(self._orders)

    def orders(self, step: ScheduledStep) -> Orders:
        self.replica.clock.computing(prompt for prompt, _ in step.prompts)
        return self._orders

    # Results for the event loop.

    @property
    def num_requests(self) -> int:
        """Number of requests, migrations still being sent, and served fetches."""
        return len(self._answers) + len(self._moves) + len(self.replica.served_fetches)

    def take_tokens(self) -> dict[str, list[StreamToken]]:
        return self._answers.take_tokens()

    def status(self) -> pb.Status:
        status = self.replica.status()
        status.running += self._moves.num_paused
        status.context_tokens = sum(len(sequence.tokens) for sequence in self.replica.engine.decoding.running)
        status.decode_step_s = self.replica.pace.decode_step_s
        return status

    # One request, from admission to its end.

    def _admitted(self, prompt: Prompt) -> None:
        listener = self._answers.listener(prompt)
        prompt.spent = PromptSpent(waited_s=self.replica.clock.waited_s(prompt))
        if not prompt.is_received:
            listener.reserved(None, None, prompt.num_cached)
            if prompt.fetch_end > prompt.num_cached:
                self.replica.clock.fetching(prompt)
                self.replica.fetches.begin(prompt)
            return
        handoff = ticket_for(
            prompt, replica=self._name, addresses=self._addresses, layout=self._layout, ttl_s=self._handoff_s
        )
        opening = Opening.of(handoff, prompt.sequence.blocks[prompt.num_cached // prompt.sequence.block_size :])
        expires_at = time.monotonic() + self._handoff_s
        self._awaited[prompt] = self._incoming_transfers.open(opening, owner=prompt, expires_at=expires_at)
        listener.reserved(handoff, opening, prompt.num_cached)

    def _fail(self, prompt: Prompt, error: ClusterError) -> None:
        self.replica.totals.transfer_failures += 1
        if listener := self._remove(prompt):
            listener.ended(error)

    def _remove(self, prompt: Prompt) -> RequestListener | None:
        """Free everything that a request holds. Returns its listener, or None if it is unknown."""
        if incoming := self._awaited.pop(prompt, None):
            sequence = prompt.sequence
            sequence.blocks = sequence.blocks[: prompt.num_cached // sequence.block_size]
            self._incoming_transfers.give_up(incoming)
        return self._answers.remove(prompt)

    def _expire_incoming_transfers(self) -> None:
        for incoming in self._incoming_transfers.expired(time.monotonic()):
            reason = incoming.problem or f"no KV received within {self._handoff_s} s"
            self._fail(incoming.owner, HandoffExpired(f"handoff {incoming.id}: {reason}"))
