"""The residual stream of a step: what every layer reads, normed, and adds to."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.moe.expert_sum import ExpertSum
from engine.layers.layers import Before, Linear, RMSNorm, RowParallelLinear

# T tokens, E hidden_size, I input features, O output features


class Residual:
    """Owned by one step.

    On a CPU a product takes the norm before it and the addition after it along. On a GPU each of them would be a kernel
    of its own: there what is added waits until the sum is read, and the kernel that norms the sum makes it. The bits
    are the same.
    """

    def __init__(self, x_TE: Tensor, *, adds_late: bool) -> None:
        self._x_TE = x_TE
        self._adds_late = adds_late
        # Still to be added, in this order.
        self._experts: ExpertSum | None = None
        self._update_TE: Tensor | None = None

    def into(self, linear: Linear, *, norm: RMSNorm) -> Tensor:
        """linear(norm(x)): (T, O)."""
        if self._adds_late:
            return linear(self.normed(norm))
        return linear(self._x_TE, before=norm)

    def normed(self, norm: RMSNorm) -> Tensor:
        """(T, E)"""
        if self._experts is None and self._update_TE is None:
            return norm(self._x_TE)
        self._x_TE, normed_TE = norm.of_sum(self._x_TE, self._update_TE, experts=self._experts)
        self._experts = self._update_TE = None
        return normed_TE

    def add_product(self, part: RowParallelLinear, x_TI: Tensor, *, before: Before | None = None) -> None:
        """x + part(before(x_TI))"""
        if self._adds_late:
            self.add(part(x_TI, before=before))
        else:
            self._x_TE = part(x_TI, before=before, residual_TO=self._x_TE)

    def add(self, update: Tensor | ExpertSum) -> None:
        """update: (T, E), or what will be that."""
        if not self._adds_late:
            self._x_TE = self._x_TE + (update.total() if isinstance(update, ExpertSum) else update)
            return
        if self._update_TE is not None or (isinstance(update, ExpertSum) and self._experts is not None):
            self.total()
        if isinstance(update, ExpertSum):
            self._experts = update
        else:
            self._update_TE = update

    def total(self) -> Tensor:
        """(T, E), with nothing left to be added."""
        if self._experts is not None:
            self._x_TE = self._x_TE + self._experts.total()
        if self._update_TE is not None:
            self._x_TE = self._x_TE + self._update_TE
        self._experts = self._update_TE = None
        return self._x_TE
