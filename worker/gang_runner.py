"""Execution of a step on every rank of a replica: orders first, then the rank's share of the batch."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from core.types.errors import ReplicaFailed
from core.types.failpoint import Failpoint, FailpointStage, unobserved
from core.types.handoff import HandoffKey
from engine.batch.batch import Batch, DeviceTokens, KeptRows
from engine.batch.rows import RowChanges
from engine.runner.runner import ModelRunner
from engine.sampling.prompt_scorer import Scorer
from engine.scheduler.step import ScheduledStep
from engine.scheduler.step_commands import BeginOrder, DeviceTokenOrder, DraftOrder, IncomingTransferOrder, Orders
from engine.spec_decode.heads.head_row import Choose, HeadLogits, HeadRow
from engine.tiers.rank_tiers import RankTiers
from kvtransfer.protocol.rank_transfer import RankTransfer
from kvtransfer.transfer.rank_servicer import StepCount
from kvtransfer.transfer.sender import Sender

_HEADER = struct.Struct("<I")  # length of the orders; padding after them aligns the rows
_ALIGNED = 8
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Orders)


def encode_step(changes: RowChanges | None, orders: Orders) -> bytes:
    """Encode the orders and the row changes, if any."""
    packed = _encoder.encode(orders)
    padding = bytes(-(_HEADER.size + len(packed)) % _ALIGNED)
    return b"".join((_HEADER.pack(len(packed)), packed, padding, changes.encode().tobytes() if changes else b""))


def decode_step(data: bytes) -> tuple[RowChanges | None, Orders]:
    """Decode a step. Raises ReplicaFailed for a malformed message, because a rank cannot skip a step."""
    try:
        (length,) = _HEADER.unpack_from(data)
        end = _HEADER.size + length
        orders = _decoder.decode(data[_HEADER.size : end])
        end += -end % _ALIGNED
        changes = RowChanges.decode(np.frombuffer(data, dtype=np.int64, offset=end).copy()) if len(data) > end else None
    except (struct.error, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise ReplicaFailed(f"malformed step message from rank 0: {error}") from error
    return changes, orders


class GangRunner:
    """Executor of steps with the model, lower tiers and sender of one rank.

    Used by the step thread on rank 0, by the following thread on other ranks.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sender: Sender,
        tiers: RankTiers | None,
        *,
        steps: StepCount | None = None,
        failpoint: Failpoint = unobserved,
    ) -> None:
        """steps: counts the steps that rank 0 has broadcast, or that another rank has executed."""
        self.runner = runner
        self.sender = sender
        self.failpoint = failpoint
        self.tiers = tiers
        self._steps = steps or StepCount()
        self._incoming_transfers: list[IncomingTransferOrder] = []  # not yet broadcast

    @property
    def has_others(self) -> bool:
        """Return whether other ranks follow this one."""
        return self.runner.parallel.size > 1

    @property
    def is_async(self) -> bool:
        """Return whether a launched step completes asynchronously.

        With expert parallelism a launch waits for the device in every layer, so scheduling ahead would only delay
        tokens.
        """
        return self.runner.device.type == "cuda" and not self.runner.spreads_experts

    def execute(self, step: ScheduledStep | None, orders: Orders) -> Tensor | None:
        """Execute a step together with the other ranks. Implements engine.scheduler.step.Runner, on rank 0."""
        device_tokens = step.device_tokens if step and self.has_others else None
        if device_tokens:
            orders.device_tokens = DeviceTokenOrder(
                len(device_tokens.token_ids), device_tokens.sources.tolist(), device_tokens.places.tolist()
            )
        self._broadcast(step.changes if step else None, orders)
        batch = step.batch if step else None
        self._carry_out(orders)
        if device_tokens:
            self.runner.parallel.broadcast_on_device(torch.as_tensor(device_tokens.token_ids).to(torch.int32))
        scorer = Scorer.of(step)
        return self._compute(batch, self._shipped(batch, orders), scorer.add if scorer else None) if batch else None

    def follow(self) -> None:
        """Execute rank 0's steps on another rank, until it sends stop. Raises ReplicaFailed for a malformed message.

        Rank 0 validates steps. The assertions here cover only ids outside the pool or the vocabulary, and deadlocks
        between ranks. Any error ends the rank.
        """
        last_rows = KeptRows(self.runner.layout.block_size)
        while True:
            changes, orders = decode_step(self.runner.parallel.broadcast_bytes())
            if orders.stop:
                return
            for incoming in orders.incoming_transfers:
                self._arrived(incoming)
            self._carry_out(orders)
            if draft := orders.draft:
                assert changes is None, "drafts are made between steps"
                assert len(draft.rows) <= self.runner.max_drafted, f"{len(draft.rows)} rows to draft for"
                self.runner.draft([HeadRow(*row) for row in draft.rows], draft.max_tokens, self._receive_choice)
            if changes is not None:
                self._assert_within(changes)
                expected = changes.number if changes.is_whole else last_rows.number + 1
                assert changes.number == expected, f"rank 0 sent step {changes.number} instead of {expected}"
                device_tokens = self._receive(orders.device_tokens, len(last_rows)) if orders.device_tokens else None
                self._follow(last_rows.apply(changes, device_tokens), orders)
            self._steps.add()

    def _assert_within(self, changes: RowChanges) -> None:
        """Assert that ids are in range, because kernels do not check them."""
        for name, numbers, end in (
            ("block id", changes.blocks, self.runner.pool.num_blocks),
            ("state slot", changes.state_indices, max(1, self.runner.pool.num_states)),
            ("state slot", changes.state_writes[:, 2], self.runner.pool.num_states),
            ("token id", changes.token_ids, self.runner.config.vocab_size),
        ):
            assert ((numbers >= 0) & (numbers < end)).all(), f"{name} of rank 0 out of range [0, {end})"

    def _follow(self, batch: Batch, orders: Orders) -> None:
        shipped = self._shipped(batch, orders)
        self._compute(batch, shipped)
        for transfer, _, end in shipped or ():
            if end == transfer.handoff.num_tokens:
                transfer.commit(end)

    def arrived(self, blocks: Sequence[int], first_token: int, end_token: int, features: bytes) -> None:
        """Record on rank 0 that KV of these positions was received, with the features of the last position."""
        incoming = IncomingTransferOrder(list(blocks), first_token, end_token, features)
        self._arrived(incoming)
        if self._shares_heads:
            self._incoming_transfers.append(incoming)

    def draft(self, rows: Sequence[HeadRow], max_tokens: int, choose: Choose) -> None:
        """Draft on rank 0, as in RankHeads; together with the other ranks if each has a share of the heads."""
        if not self._shares_heads:
            self.runner.draft(rows, max_tokens, choose)
            return
        rows, max_tokens = rows[: self.runner.max_drafted], min(max_tokens, self.runner.layout.block_size)
        order_rows = [(row.token_id, row.position, list(row.blocks)) for row in rows]
        self._broadcast(None, Orders(draft=DraftOrder(order_rows, max_tokens)))

        def broadcast_choice(logits: HeadLogits, known: Sequence[int], place: int) -> Sequence[int]:
            chosen = choose(logits, known, place)
            self.runner.parallel.broadcast(np.array(chosen, dtype=np.int64))
            return chosen

        self.runner.draft(rows, max_tokens, broadcast_choice)

    def commit(self, key: HandoffKey, first_tokens: list[int]) -> None:
        """Commit on rank 0 a prompt that was shipped while it was computed, with its first tokens.

        The other ranks commit by themselves after the prompt's last position.
        """
        if transfer := self.sender.find(key):
            self._commit(transfer, transfer.handoff.num_tokens, first_tokens)

    @property
    def _shares_heads(self) -> bool:
        return self.has_others and self.runner.layout.num_draft_layers > 0

    def _broadcast(self, changes: RowChanges | None, orders: Orders) -> None:
        """Broadcast a step to the other ranks, with the transfers received since the last one."""
        if self.has_others:
            orders.incoming_transfers, self._incoming_transfers = self._incoming_transfers, []
            self.runner.parallel.broadcast_bytes(encode_step(changes, orders))
            self._steps.add()

    def _receive(self, order: DeviceTokenOrder, num_rows: int) -> DeviceTokens:
        """Receive the tokens of the step before. Only the device sees them, so they are clamped to the vocabulary."""
        assert order.num_chosen == num_rows, f"rank 0 chooses {order.num_chosen} tokens for {num_rows} rows"
        token_ids = torch.empty(order.num_chosen, dtype=torch.int32, device=self.runner.device)
        self.runner.parallel.broadcast_on_device(token_ids)
        token_ids.clamp_(max=self.runner.config.vocab_size - 1)
        return DeviceTokens(token_ids=token_ids, sources=np.array(order.sources), places=np.array(order.places))

    def _receive_choice(self, logits: HeadLogits, known: Sequence[int], place: int) -> Sequence[int]:
        chosen: list[int] = self.runner.parallel.broadcast().tolist()
        if len(chosen) != len(known) or not all(0 <= token < self.runner.config.vocab_size for token in chosen):
            raise ReplicaFailed(
                f"rank 0 chose {len(chosen)} tokens for {len(known)} rows, or ids outside the vocabulary of "
                f"{self.runner.config.vocab_size}"
            )
        return chosen

    def _arrived(self, incoming: IncomingTransferOrder) -> None:
        if heads := self.runner.heads:
            heads.features.arrived(incoming.blocks, incoming.start, incoming.end, incoming.features)

    def _compute(
        self,
        batch: Batch,
        shipped: list[tuple[RankTransfer, int, int]] | None,
        on_logits: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Run the forward pass: by CUDA graph if `shipped` is None, else layer by layer.

        The choice follows from the orders alone, not from the state of this rank's transfers, because all ranks must
        take part in the same collectives.
        """
        self.failpoint(FailpointStage.COMPUTING, "")
        if shipped is None:
            return self.runner.forward(batch, on_logits=on_logits)

        def on_layer(layer: int) -> None:
            for transfer, start, end in shipped:
                transfer.layer_ready(layer, start, end)

        return self.runner.forward(batch, on_layer, on_logits)

    def _carry_out(self, orders: Orders) -> None:
        if orders.reads_pool:
            self.runner.settle()
        for order in orders.tiers:
            assert self.tiers, "order for tiers, but this rank has none"
            self.tiers.carry_out(order)
        assert all(0 <= part < self.runner.pool.num_window_parts for _, part in orders.parts), "part out of range"
        self.runner.copy(orders)
        for order in orders.tiers:
            # After the copies, because a load may overwrite a state slot that one of them reads or writes.
            assert self.tiers
            self.tiers.start_loads(order)
        for served_fetch in orders.served_fetches:
            self._served_fetch(served_fetch)
        for begin in orders.begins:
            if transfer := self.sender.begin(begin.handoff, begin.blocks, begin.state_slot):
                transfer.all_layers_ready(0, begin.num_tokens)
        for ship in orders.ships:
            if transfer := self.sender.find(ship.key):
                transfer.blocks, transfer.state_slot = tuple(ship.blocks), ship.state_slot
                transfer.all_layers_ready(ship.start, ship.end)
        for commit in orders.commits:
            if transfer := self.sender.find(commit.key):
                self._commit(transfer, commit.num_tokens, commit.next_tokens)
        for key in orders.aborts:
            if transfer := self.sender.find(key):
                transfer.abort()

    def _served_fetch(self, served_fetch: BeginOrder) -> None:
        if transfer := self.sender.begin(served_fetch.handoff, served_fetch.blocks, served_fetch.state_slot):
            transfer.all_layers_ready(0, served_fetch.num_tokens)
            self._commit(transfer, served_fetch.num_tokens)

    def _commit(self, transfer: RankTransfer, num_tokens: int, next_tokens: Sequence[int] = ()) -> None:
        self.runner.settle()
        heads = self.runner.heads
        features = heads.features.of(transfer.blocks, num_tokens) if heads else b""
        transfer.commit(num_tokens, next_tokens, features=features)

    def _shipped(self, batch: Batch, orders: Orders) -> list[tuple[RankTransfer, int, int]] | None:
        """Return the active transfers of the batch, each with the positions [start, end) that its row computes.

        Transfers that have failed, or to which this rank sends no heads, are left out. Returns None if the orders ship
        no row.
        """
        if not any(orders.rows):
            return None
        ends = batch.context_lens.tolist()
        starts = (batch.context_lens - batch.query_lens).tolist()
        spans = zip(orders.rows, starts, ends, strict=True)
        transfers = ((self.sender.find(key), start, end) for key, start, end in spans if key)
        return [(transfer, start, end) for transfer, start, end in transfers if transfer]
