"""Live migration of choices to other decode replicas.

    COPYING ──all KV sent, or no room──> PAUSED ──landed──> moved
       │                                   │
       └─ failed, aborted, ended           └─ failed, aborted: decoding resumes on this replica

While COPYING, the choice continues to decode; the new positions are shipped during a short pause. Its blocks are held
until the end, so that a failed migration costs only the bytes sent. With recurrent layers no step runs ahead meanwhile,
because a step overwrites the state that the pause ships.
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
from kvtransfer.protocol.outgoing_transfers import OutgoingTransfer, OutgoingTransfers, parts_of_handoff
from kvtransfer.protocol.rank_transfer import Shipment
from worker.gang_runner import GangRunner

_LINK_BYTES_PER_S = 100e6  # assumed until measured
_MIN_MOVE_S = 0.05  # fixed cost: a link, two calls and a pause


class MoveListener(Protocol):
    """Observer of one migration. One method is called, once, on the step thread."""

    def moved(self, num_tokens: int, shipment: Shipment, pause_s: float) -> None: ...

    def stays(self, reason: str) -> None: ...


class MoveState(StrEnum):
    COPYING = "copying"
    PAUSED = "paused"


@dataclass(eq=False)
class Move:
    """Migration of one choice to another replica."""

    sequence: Sequence
    handoff: Handoff
    listener: MoveListener
    state: MoveState = MoveState.COPYING
    outgoing: OutgoingTransfer[Move] | None = None  # set in the first step
    num_shipped: int = 0  # positions
    paused_at: float = 0.0


def is_quicker_to_ship(*, num_bytes: int, bytes_per_s: float, num_steps: int, step_s: float) -> bool:
    """Return whether shipping a sequence's KV takes less time than decoding up to `num_steps` more tokens."""
    return _MIN_MOVE_S + num_bytes / bytes_per_s < num_steps * step_s


class Moves:
    """Registry of migrations, owned by the step thread. `leave` ends a choice that has moved."""

    def __init__(
        self,
        gang: GangRunner,
        blocks: BlockManager,
        engine: Engine[Tensor],
        link_rate: Rate,
        *,
        leave: Callable[[Sequence], None],
    ) -> None:
        self._link_rate = link_rate  # bytes/s
        self._gang = gang
        self._layout = gang.runner.layout
        self._cache = self._layout.cache.of_ranks(self._layout.tensor_parallel)
        self._outgoing_transfers: OutgoingTransfers[Move] = OutgoingTransfers(blocks, self._layout)
        self._engine = engine
        self._blocks = blocks
        self._leave = leave
        self._under_way: dict[Sequence, Move] = {}

    def __len__(self) -> int:
        """Return the number of active migrations, including cancelled ones that are still being sent."""
        return len(self._outgoing_transfers)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._under_way

    @property
    def num_paused(self) -> int:
        return sum(move.state is MoveState.PAUSED for move in self._under_way.values())

    def knows(self, key: HandoffKey) -> bool:
        """Return whether a handoff is or was used for a migration."""
        return self._outgoing_transfers.knows(key)

    def begin(self, sequence: Sequence, handoff: Handoff, listener: MoveListener, *, step_s: float) -> None:
        """Start shipping a decoding choice, unless it is expected to finish sooner. step_s: seconds per token."""
        if sequence in self._under_way or self.knows(handoff.key):
            listener.stays("choice is migrating already, or the handoff was used before")
        elif handoff.num_tokens >= len(sequence.tokens):
            listener.stays(f"choice has {len(sequence.tokens)} tokens, the handoff requires {handoff.num_tokens + 1}")
        elif handoff.max_tokens < sequence.num_computed:
            listener.stays(f"choice has {len(sequence.tokens)} tokens, the handoff has room for {handoff.max_tokens}")
        elif is_quicker_to_ship(
            num_bytes=self._cache.shipped_bytes(sequence.num_computed, held=handoff.first_token),
            bytes_per_s=self._link_rate.per_s or _LINK_BYTES_PER_S,
            num_steps=sequence.request.sampling.max_tokens - sequence.num_generated,
            step_s=step_s,
        ):
            self._under_way[sequence] = Move(sequence, handoff, listener)
            self._outgoing_transfers.claim(handoff.key)
            sequence.most_tokens = handoff.max_tokens  # capacity of the receiver
            if sequence.state_slots:
                self._engine.in_step.add(sequence)
        else:
            listener.stays("choice is expected to finish sooner on this replica")

    def cancel(self, sequence: Sequence, reason: str) -> None:
        """Cancel the migration of a choice, if any."""
        if move := self._under_way.get(sequence):
            self._fail(move, HandoffExpired(reason))

    def shipped(self, rank: int, shipment: Shipment) -> Shipment | None:
        """Record that one rank has ended its part. Returns the combined shipment once the choice has moved."""
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
        """Add the migrations' orders for the next step."""
        for move in list(self._under_way.values()):
            if self._was_preempted(move):
                self._fail(move, HandoffExpired("the choice was preempted"))
            elif move.outgoing is None:
                self._start(move, orders)
            elif move.state is MoveState.COPYING:
                has_room = move.sequence.num_computed < move.handoff.max_tokens
                if not has_room or self._is_sent(move.outgoing.key):
                    self._stop_and_commit(move, orders)
        orders.aborts += self._outgoing_transfers.take_aborts()

    def _was_preempted(self, move: Move) -> bool:
        """Return whether the choice was preempted; it may have other blocks by now."""
        if move.state is MoveState.COPYING and move.sequence not in self._engine.decoding.running:
            return True
        return move.outgoing is not None and move.sequence.blocks[: len(move.outgoing.blocks)] != move.outgoing.blocks

    def _start(self, move: Move, orders: Orders) -> None:
        sequence, windows = move.sequence, self._blocks.windows
        if windows and parts_of_handoff(move.handoff, windows) > windows.num_unreserved:
            self._fail(move, HandoffExpired("this replica has no room to hold the windows that it would ship"))
            return
        move.outgoing = self._outgoing_transfers.begin(move.handoff, sequence.blocks, owner=move)
        orders.begins.append(BeginOrder(move.handoff, sequence.blocks, sequence.num_computed))
        move.num_shipped = sequence.num_computed

    def _ship(self, move: Move, orders: Orders) -> None:
        """Ship the positions computed since the last call, and the state at their end, which no step may change."""
        assert move.outgoing
        sequence = move.sequence
        state_slots = sequence.state_slots[:1]  # read here, because every draft moves the state to another slot
        self._outgoing_transfers.grow(move.outgoing, sequence.blocks, state_slots=state_slots)
        ship = ShipOrder(move.outgoing.key, sequence.blocks, move.num_shipped, sequence.num_computed, *state_slots)
        orders.ships.append(ship)
        move.num_shipped = sequence.num_computed

    def _stop_and_commit(self, move: Move, orders: Orders) -> None:
        assert move.outgoing
        sequence = move.sequence
        self._engine.pause(move.sequence)
        self._engine.in_step.discard(move.sequence)
        move.state, move.paused_at = MoveState.PAUSED, time.monotonic()
        self._ship(move, orders)
        # The receiver has all tokens up to and including position num_tokens.
        unknown = sequence.tokens[move.handoff.num_tokens + 1 :]
        orders.commits.append(CommitOrder(move.outgoing.key, sequence.num_computed, unknown))

    def _is_sent(self, key: HandoffKey) -> bool:
        """Return whether rank 0 has sent everything. The other ranks send the same amount."""
        transfer = self._gang.sender.find(key)
        return transfer is not None and transfer.is_idle

    def _fail(self, move: Move, error: TransferError) -> None:
        if self._under_way.pop(move.sequence, None) is None:
            return
        move.sequence.most_tokens = move.sequence.max_context
        self._engine.in_step.discard(move.sequence)
        if move.outgoing:
            self._outgoing_transfers.abort(move.outgoing, error)
        self._outgoing_transfers.release(move.handoff.key)
        if move.state is MoveState.PAUSED:
            self._engine.resume(move.sequence)
        move.listener.stays(str(error))
