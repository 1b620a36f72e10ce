"""What every rank of a decode replica does in a step."""

from __future__ import annotations

from torch import Tensor

from engine.batch import Batch
from engine.runner import ModelRunner
from engine.step_message import Orders, decode_step, encode_step

# Orders of a decode step, beside its batch:
#   copy   blocks (source, target) to copy before the batch is computed
#   stop   true: the replica ends


class DecodeRank:
    """One rank's model. Belongs to the step thread on rank 0, to the following thread elsewhere."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

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
        for source, target in orders.get("copy", ()):
            self.runner.pool.copy_block(source, target)
        return self.runner.forward(batch) if batch else None
