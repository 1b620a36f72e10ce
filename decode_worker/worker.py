"""Decode worker on rank 0: receives prompts and emits every token."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from core.rpc import worker_pb2 as pb
from core.types.errors import ClusterError, HandoffExpired, TransferError
from core.types.handoff import Handoff
from engine.scheduler.prompts import Prompt
from engine.scheduler.step import ScheduledStep
from engine.scheduler.step_commands import Orders
from engine.spec_decode.speculation import Speculation
from engine.spec_decode.suffix import Corpus
from kvtransfer.protocol.frames import Opening
from kvtransfer.protocol.incoming_transfers import IncomingTransfer, IncomingTransfers, ReceivingEnd
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.rank_transfer import Shipment
from worker.answers import RequestListener
from worker.worker import EngineParts, Worker


class DecodeWorker(Worker):
    """Requests of one decode replica, most of which get their KV from a prefill replica.

    `close_handoff` closes a handoff on the other ranks and then runs its callback on the step thread.
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
        super().__init__(parts, speculation=speculation, corpus=corpus)
        self._name = name
        self._addresses = tuple(addresses)
        self._handoff_s = handoff_s
        self._awaited: dict[Prompt, IncomingTransfer[Prompt]] = {}  # prompts that wait for KV
        self._incoming_transfers: IncomingTransfers[Prompt] = IncomingTransfers(
            receiver, parts.blocks, num_ranks=len(addresses), close_elsewhere=close_handoff
        )
        self._orders = Orders()  # for the next step

    # Results of transfers.

    def landed(self, rank: int, landing: Landing) -> None:
        super().landed(rank, landing)
        incoming = self._incoming_transfers.landed(rank, landing)
        if incoming is None:
            return
        prompt, landing = incoming.owner, incoming.landing
        num_tokens, next_tokens = landing.num_tokens, landing.next_tokens
        del self._awaited[prompt]
        sequence, vocab_size = prompt.sequence, self.gang.runner.config.vocab_size
        if prompt.is_running_elsewhere:
            is_whole = len(sequence.tokens) + len(next_tokens) == num_tokens + 1
            is_whole &= num_tokens <= len(sequence.blocks) * sequence.block_size
        else:
            is_whole = len(next_tokens) == len(prompt.choices)
        is_whole &= all(0 <= token < vocab_size for token in next_tokens)
        if is_whole:
            self._note_arrival(sequence, prompt.num_cached, num_tokens, landing.features)
            prefilled = self.engine.landed(prompt, num_tokens, next_tokens)
            self._note_whole(prompt)
            self.answers.start(prefilled, epoch=landing.epoch)
        else:
            self._fail(
                prompt,
                TransferError(
                    f"received {num_tokens} positions and {len(next_tokens)} next tokens, starting "
                    f"{list(next_tokens)[:4]}, which do not fit the request"
                ),
            )

    def shipped(self, rank: int, shipment: Shipment) -> None:
        self._shipped_move(rank, shipment)
        if served := self.served_fetches.shipped(rank, shipment):
            self._count_shipment(served)

    # Steps.

    def begin_step(self, admitted: Seq[Prompt]) -> None:
        if admitted:
            self.parts.flush_copies()
        for prompt in admitted:
            self._admitted(prompt)
        self._orders = self._common_orders()
        self.moves.add_to(self._orders)

    def orders(self, step: ScheduledStep) -> Orders:
        for prompt, _ in step.prompts:
            prompt.times.begin_step()
        return self._orders

    # Results for the event loop.

    def status(self) -> pb.Status:
        status = super().status()
        self._add_decoding(status)
        return status

    # One request, from admission to its end.

    def _admitted(self, prompt: Prompt) -> None:
        listener = self.answers.listener(prompt)
        prompt.spent = prompt.times.waited()
        if not prompt.is_received:
            listener.reserved(None, None, prompt.num_cached)
            if prompt in self.engine.prompts.fetching:
                prompt.times.begin_fetch()
                self.fetches.begin(prompt)
            return
        handoff = self._handoff_for(prompt)
        sequence = prompt.sequence
        missing = sequence.blocks[prompt.num_cached // sequence.block_size :]
        opening = Opening.of(handoff, missing, state_slots=sequence.state_slots)
        expires_at = time.monotonic() + self._handoff_s
        self._awaited[prompt] = self._incoming_transfers.open(opening, owner=prompt, expires_at=expires_at)
        listener.reserved(handoff, opening, prompt.num_cached)

    def _handoff_for(self, prompt: Prompt) -> Handoff:
        """Return a handoff of the positions that the prompt lacks. Its id is unique and unguessable.

        A sequence that runs on another replica has KV for all tokens but the last, and keeps growing; the handoff
        covers as many positions as there are blocks.
        """
        sequence = prompt.sequence
        is_growing = prompt.is_running_elsewhere
        num_tokens = len(sequence.tokens) - is_growing
        room = min(len(sequence.blocks) * sequence.block_size, sequence.max_context)
        return Handoff(
            id=f"{self._name}/{prompt.id}/{secrets.token_hex(16)}",
            epoch=1,
            replica=self._name,
            ranks=self._addresses,
            layout=self.gang.runner.layout.fingerprint,
            num_tokens=num_tokens,
            max_tokens=room if is_growing else num_tokens,
            first_token=prompt.num_cached,
            ttl_s=self._handoff_s,
        )

    def _fail(self, prompt: Prompt, error: ClusterError) -> None:
        self.totals.transfer_failures += 1
        if listener := self._remove(prompt):
            listener.ended(error)

    def _remove(self, prompt: Prompt) -> RequestListener | None:
        if incoming := self._awaited.pop(prompt, None):
            prompt.sequence.leave_out(incoming.opening.exposed)
            self._incoming_transfers.give_up(incoming)
        return super()._remove(prompt)

    def _expire(self) -> None:
        for incoming in self._incoming_transfers.expired(time.monotonic()):
            reason = incoming.problem or f"no KV received within {self._handoff_s} s"
            self._fail(incoming.owner, HandoffExpired(f"handoff {incoming.id}: {reason}"))
        super()._expire()
