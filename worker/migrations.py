"""Choices that are answered here, on their way to decode replicas elsewhere.

    COPYING ──all of it sent, or no room──> PAUSED ──landed──> gone from here
       │                                      │
       └─ failed, aborted, ended here         └─ failed, aborted: it goes on decoding here

While COPYING the choice goes on decoding; what it adds is shipped after the pause, which lasts as long as a few
positions take. Its blocks are held until the end, so that a move that fails costs nothing but the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torch import Tensor

from core.types.errors import HandoffExpired, TransferError
from core.types.handoff import Handoff, HandoffKey
from engine.engine import Engine
from engine.kv.block_manager import BlockManager
from engine.scheduler.sequence import Sequence
from engine.scheduler.step_commands import BeginOrder, CommitOrder, Orders, ShipOrder
from engine.timing.rate import Rate
from kvtransfer.protocol.outgoing_transfers import OutgoingTransfer, OutgoingTransfers
from kvtransfer.protocol.plan import sending_ranks
from kvtransfer.protocol.rank_transfer import Shipment
from worker.gang_runner import GangRunner

_LINK_BYTES_PER_S = 100e6  # until we have measured our own
_MIN_MOVE_S = 0.05  # a link, two calls and a pause cost about this, however little there is to ship


class MoveListener(Protocol):
    """Who waits for a move. Called on the step thread, once."""

    def moved(self, num_tokens: int, shipment: Shipment, pause_s: float) -> None: ...

    def stays(self, reason: str) -> None: ...


class MoveState(StrEnum):
    COPYING = "copying"
    PAUSED = "paused"


@dataclass(eq=False)
class Move:
    """One choice on its way to another replica."""

    sequence: Sequence
    handoff: Handoff
    listener: MoveListener
    state: MoveState = MoveState.COPYING
    outgoing: OutgoingTransfer[Move] | None = None  # from its first step on
    num_shipped: int = 0  # positions handed over
    paused_at: float = 0.0


def is_quicker_to_ship(*, num_bytes: int, bytes_per_s: float, num_steps: int, step_s: float) -> bool:
    """Whether a sequence that may run for `num_steps` more is gone sooner by shipping its KV than by waiting for it."""
    return _MIN_MOVE_S + num_bytes / bytes_per_s < num_steps * step_s


class Moves:
    """Owned by the step thread. `leave` ends a choice here because it goes on elsewhere."""

    def __init__(
        self,
        gang: GangRunner,
        blocks: BlockManager,
        engine: Engine[Tensor],
        link_rate: Rate,
        *,
        leave: Callable[[Sequence], None],
    ) -> None:
        self._link_rate = link_rate  # bytes
        self._gang = gang
        self._layout = gang.runner.layout
        self._bytes_per_token = self._layout.bytes_per_token() * self._layout.tensor_parallel
        self._outgoing_transfers: OutgoingTransfers[Move] = OutgoingTransfers(blocks)
        self._engine = engine
        self._leave = leave
        self._under_way: dict[Sequence, Move] = {}

    def __len__(self) -> int:
        """Moves under way, and what is still being sent of those that were given up."""
        return len(self._outgoing_transfers)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._under_way

    @property
    def num_paused(self) -> int:
        return sum(move.state is MoveState.PAUSED for move in self._under_way.values())

    def knows(self, key: HandoffKey) -> bool:
        """Whether a handoff serves a move, or has served one."""
        return self._outgoing_transfers.knows(key) or any(move.handoff.key == key for move in self._under_way.values())

    def begin(self, sequence: Sequence, handoff: Handoff, listener: MoveListener, *, step_s: float) -> None:
        """Begin to ship a choice that decodes here, a token every `step_s`; unless it is gone sooner by itself."""
        if sequence in self._under_way or self.knows(handoff.key):
            listener.stays("it is being moved already, or was")
        elif handoff.num_tokens >= len(sequence.tokens):
            listener.stays(f"it has {len(sequence.tokens)} tokens, the handoff is for more")
        elif handoff.max_tokens < sequence.num_computed:
            listener.stays(f"it has {len(sequence.tokens)} tokens, the handoff has room for {handoff.max_tokens}")
        elif is_quicker_to_ship(
            num_bytes=(sequence.num_computed - handoff.first_token) * self._bytes_per_token,
            bytes_per_s=self._link_rate.per_s or _LINK_BYTES_PER_S,
            num_steps=sequence.request.sampling.max_tokens - sequence.num_generated,
            step_s=step_s,
        ):
            self._under_way[sequence] = Move(sequence, handoff, listener)
            sequence.most_tokens = handoff.max_tokens  # KV of so many tokens finds room there
            sequence.keeps_blocks = True
        else:
            listener.stays("it ends sooner here")

    def cancel(self, sequence: Sequence, reason: str) -> None:
        """The choice is not to be moved, or has ended. Does nothing if it is not being moved."""
        if move := self._under_way.get(sequence):
            self._fail(move, HandoffExpired(reason))

    def shipped(self, rank: int, shipment: Shipment) -> Shipment | None:
        """One of our ranks has nothing more to send. The shipment of all ranks, once the choice has moved."""
        outgoing = self._outgoing_transfers.ended(rank, shipment)
        if outgoing is None:
            return None
        move = outgoing.owner
        if outgoing.error:
            self._fail(move, outgoing.error)
        elif outgoing.is_over and move.sequence in self._under_way:
            del self._under_way[move.sequence]
            num_tokens = len(move.sequence.tokens)
            shipment = outgoing.shipment
            self._link_rate.add(shipment.wire_bytes, shipment.link_s)
            self._leave(move.sequence)
            move.listener.moved(num_tokens, shipment, time.monotonic() - move.paused_at)
            return shipment
        return None

    def add_to(self, orders: Orders) -> None:
        """What the ranks must do for the moves in the next step."""
        for move in list(self._under_way.values()):
            if self._was_preempted(move):
                self._fail(move, HandoffExpired("it was preempted"))
            elif move.outgoing is None:
                self._start(move, orders)
            elif move.state is MoveState.COPYING:
                has_room = move.sequence.num_computed < move.handoff.max_tokens
                if not has_room or self._is_sent(move.outgoing.key):
                    self._stop_and_commit(move, orders)
        orders.aborts += self._outgoing_transfers.take_aborts()

    def _was_preempted(self, move: Move) -> bool:
        """It may have blocks again, but others."""
        if move.outgoing is None:
            return move.sequence not in self._engine.decoding.running
        return move.sequence.blocks[: len(move.outgoing.blocks)] != move.outgoing.blocks

    def _start(self, move: Move, orders: Orders) -> None:
        sequence = move.sequence
        ranks = sending_ranks(self._layout, num_receivers=len(move.handoff.ranks))
        move.outgoing = self._outgoing_transfers.begin(move.handoff, sequence.blocks, ranks=ranks, owner=move)
        orders.begins.append(BeginOrder(move.handoff, sequence.blocks, sequence.num_computed))
        move.num_shipped = sequence.num_computed

    def _ship(self, move: Move, orders: Orders) -> None:
        """Hand over every position that has been computed since the last time."""
        assert move.outgoing
        sequence = move.sequence
        self._outgoing_transfers.grow(move.outgoing, sequence.blocks)
        ship = ShipOrder(move.outgoing.key, sequence.blocks, move.num_shipped, sequence.num_computed)
        orders.ships.append(ship)
        move.num_shipped = sequence.num_computed

    def _stop_and_commit(self, move: Move, orders: Orders) -> None:
        assert move.outgoing
        sequence = move.sequence
        self._engine.pause(move.sequence)
        move.state, move.paused_at = MoveState.PAUSED, time.monotonic()
        self._ship(move, orders)
        # The other side knows all tokens up to the first whose KV it does not ask for.
        unknown = sequence.tokens[move.handoff.num_tokens + 1 :]
        orders.commits.append(CommitOrder(move.outgoing.key, sequence.num_computed, unknown))

    def _is_sent(self, key: HandoffKey) -> bool:
        """On rank 0, which stands for the others: they send as much."""
        transfer = self._gang.sender.find(key)
        return transfer is not None and transfer.is_idle

    def _fail(self, move: Move, error: TransferError) -> None:
        if self._under_way.pop(move.sequence, None) is None:
            return
        move.sequence.most_tokens = move.sequence.max_context
        move.sequence.keeps_blocks = False
        if move.outgoing:
            self._outgoing_transfers.abort(move.outgoing, error)
        if move.state is MoveState.PAUSED:
            self._engine.resume(move.sequence)
        move.listener.stays(str(error))
