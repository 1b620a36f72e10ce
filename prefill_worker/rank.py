"""What every rank of a prefill replica does in a step: compute, and ship each layer as soon as it is there."""

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
from kvtransfer.protocol.passage import Key, Passage

# Orders of a prefill step, beside its batch:
#   tiers  blocks that go down to a lower tier, and come back: before anything is written to the pool
#   meet   true: wait until every rank has carried that out
#   grant  prefixes that are in the pool, and that another replica has asked for; see kvtransfer.movers.grants
#   begin  handoffs whose first chunk is in this batch: the handoff, its sequence's blocks, how many tokens are here
#   rows   for each row of the batch, the handoff (id, epoch) that its KV belongs to, or null
#   abort  handoffs (id, epoch) that are no longer wanted
#   stop   true: the replica ends


def begin_order(handoff: Handoff, blocks: list[int], *, num_tokens: int) -> dict[str, Any]:
    return {"handoff": asdict(handoff), "blocks": blocks, "num_tokens": num_tokens}


class PrefillRank:
    """One rank's model and its passages. Belongs to the step thread on rank 0, to the following thread elsewhere."""

    def __init__(self, runner: ModelRunner, sender: Sender, tiers: RankTiers | None) -> None:
        self.runner = runner
        self.sender = sender
        self.tiers = tiers

    def lead(self, batch: Batch | None, orders: Orders) -> Tensor | None:
        """On rank 0: do a step together with the other ranks. Logits of the rows that end their prompts."""
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
            for passage in self._complete(batch, orders):
                passage.commit(passage.handoff.num_tokens)

    def commit(self, key: Key, first_tokens: list[int]) -> None:
        """On rank 0: the prompt is computed and its first tokens are known."""
        if passage := self.sender.find(key):
            passage.commit(passage.handoff.num_tokens, first_tokens)

    def _execute(self, batch: Batch | None, orders: Orders) -> Tensor | None:
        for fields in orders.get("tiers", ()):
            assert self.tiers, "orders for tiers that this rank does not have"
            self.tiers.carry_out(TierOrders.from_json(fields))
        if orders.get("meet"):
            self.runner.parallel.meet()
        for order in orders.get("grant", ()):
            grants.carry_out(order, self.sender)
        for order in orders.get("begin", ()):
            self._begin(order)
        for id, epoch in orders.get("abort", ()):
            if passage := self.sender.find((id, epoch)):
                passage.abort()
        if batch is None:
            return None
        shipping = [(passage, start, end) for passage, start, end in self._spans(batch, orders) if passage]

        def on_layer(layer: int) -> None:
            for passage, start, end in shipping:
                passage.layer_ready(layer, start, end)

        return self.runner.forward(batch, on_layer)

    def _begin(self, order: dict[str, Any]) -> None:
        fields = order["handoff"]
        handoff = Handoff(**{**fields, "ranks": tuple(fields["ranks"])})
        passage = self.sender.begin(handoff, order["blocks"])
        if passage:
            passage.layer_ready(0, 0, order["num_tokens"], num_layers=self.runner.layout.num_layers)

    def _spans(self, batch: Batch, orders: Orders) -> list[tuple[Passage | None, int, int]]:
        """Each row's passage, and the positions [start, end) that the row computes."""
        keys = [tuple(key) if key else None for key in orders["rows"]]
        ends = batch.context_lens.tolist()
        starts = (batch.context_lens - batch.query_lens).tolist()
        return [
            (self.sender.find(key) if key else None, start, end)
            for key, start, end in zip(keys, starts, ends, strict=True)
        ]

    def _complete(self, batch: Batch | None, orders: Orders) -> list[Passage]:
        """The passages whose last position this batch computed."""
        if batch is None:
            return []
        return [
            passage for passage, _, end in self._spans(batch, orders) if passage and end == passage.handoff.num_tokens
        ]
