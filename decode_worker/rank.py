"""What every rank of a decode replica does in a step."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import Tensor

from cluster.words.handoff import Handoff
from engine.batch.batch import Batch
from engine.batch.step_message import Orders, decode_step, encode_step
from engine.runner import ModelRunner
from engine.tiers.orders import TierOrders
from engine.tiers.rank_tiers import RankTiers
from kvtransfer.movers import grants
from kvtransfer.movers.sender import Sender

# Orders of a decode step, beside its batch, in the order in which they are carried out:
#   tiers   blocks that go down to a lower tier, and come back: before anything is written to the pool
#   meet    true: wait until every rank has carried that out
#   copy    blocks (source, target) to copy before the batch is computed
#   grant   prefixes that are in the pool, and that another replica has asked for; see kvtransfer.movers.grants
#   begin   handoffs to which a sequence of ours is to be shipped
#   ship    (id, epoch, block table, start, end): positions whose KV was computed in earlier steps
#   commit  (id, epoch, num_tokens, next_tokens): nothing more comes
#   abort   handoffs (id, epoch) that are no longer wanted
#   stop    true: the replica ends


def begin_order(handoff: Handoff) -> dict[str, Any]:
    return asdict(handoff)


class DecodeRank:
    """One rank's model and its links to other decode replicas. Belongs to the step thread on rank 0, to the following
    thread elsewhere."""

    def __init__(self, runner: ModelRunner, sender: Sender, tiers: RankTiers | None) -> None:
        self.runner = runner
        self.sender = sender
        self.tiers = tiers

    def lead(self, batch: Batch | None, orders: Orders) -> Tensor | None:
        """On rank 0: do a step together with the other ranks. Logits of the rows that want them."""
        if self.runner.parallel.size > 1:
            self.runner.parallel.broadcast_bytes(encode_step(batch, orders))
        return self._execute(batch, orders)

    def follow(self) -> None:
        """On the other ranks: do what rank 0 says until it says stop."""
        while True:
            batch, orders = decode_step(self.runner.parallel.broadcast_bytes())
            if orders.get("stop"):
                return
            self._execute(batch, orders)

    def _execute(self, batch: Batch | None, orders: Orders) -> Tensor | None:
        for fields in orders.get("tiers", ()):
            assert self.tiers, "orders for tiers that this rank does not have"
            self.tiers.carry_out(TierOrders.from_json(fields))
        if orders.get("meet"):
            self.runner.parallel.meet()
        for source, target in orders.get("copy", ()):
            self.runner.pool.copy_block(source, target)
        for order in orders.get("grant", ()):
            grants.carry_out(order, self.sender)
        for fields in orders.get("begin", ()):
            self.sender.begin(Handoff(**{**fields, "ranks": tuple(fields["ranks"])}), ())
        for id, epoch, blocks, start, end in orders.get("ship", ()):
            if passage := self.sender.find((id, epoch)):
                passage.blocks = tuple(blocks)
                passage.layer_ready(0, start, end, num_layers=self.runner.layout.num_layers)
        for id, epoch, num_tokens, next_tokens in orders.get("commit", ()):
            if passage := self.sender.find((id, epoch)):
                passage.commit(num_tokens, next_tokens)
        for id, epoch in orders.get("abort", ()):
            if passage := self.sender.find((id, epoch)):
                passage.abort()
        return self.runner.forward(batch) if batch else None
