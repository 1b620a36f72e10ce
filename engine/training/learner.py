"""What is trained: one kind of heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from engine.training.batches import TextBatch

# N answer tokens of a batch, K places of a draft


class Learner(Protocol):
    """Heads beside a model that is not trained. Owned by the process that trains."""

    @property
    def module(self) -> nn.Module:
        """Whose parameters are trained; all that changes is in them."""
        ...

    def loss(self, batch: TextBatch, *, number: int) -> Tensor:
        """Of one step of training: a function of the module, the batch, and the step's number."""
        ...

    def guesses(self, batch: TextBatch) -> Tensor:
        """(N, K): what would have been drafted, greedily, where the answers' tokens were the next ones that are not
        known. The first guess is of that very token; every further one supposes that those before it are right."""
        ...

    def published(self) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        """config.json, and the tensors, as they are published."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse, of tensors that are published."""
        ...
