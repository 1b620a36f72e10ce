"""Residual stream of a step, with fused norms and additions."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.moe.expert_sum import ExpertSum
from engine.layers.layers import Before, Linear, RMSNorm, RowParallelLinear

# T tokens, E hidden_size, I input features, O output features


class Residual:
    """Residual stream. Owned by one step.

    On a CPU a product fuses the norm before it and the addition after it. On a GPU each would be a separate kernel, so
    additions are deferred until the sum is read, and the norm kernel computes the sum. Results are bit-identical.
    """

    def __init__(self, x_TE: Tensor, *, adds_late: bool) -> None:
        self._x_TE = x_TE
        self._adds_late = adds_late
        # Deferred additions, in this order.
        self._experts: ExpertSum | None = None
        self._update_TE: Tensor | None = None

    def into(self, linear: Linear, *, norm: RMSNorm | None) -> Tensor:
        """Return linear(norm(x)), or linear(x) without a norm: (T, O)."""
        if norm is None:
            return linear(self.total())
        if self._adds_late:
            return linear(self.normed(norm))
        return linear(self._x_TE, before=norm)

    def normed(self, norm: RMSNorm | None) -> Tensor:
        """Return norm(x), or x without a norm: (T, E)."""
        if norm is None:
            return self.total()
        if self._experts is None and self._update_TE is None:
            return norm(self._x_TE)
        self._x_TE, normed_TE = norm.of_sum(self._x_TE, self._update_TE, experts=self._experts)
        self._experts = self._update_TE = None
        return normed_TE

    def add_product(
        self,
        part: RowParallelLinear,
        x_TI: Tensor,
        *,
        before: Before | None = None,
        after: RMSNorm | None = None,
        scale: float = 1.0,
    ) -> None:
        """Add after(part(before(x_TI))) * scale to the stream."""
        if after is not None or scale != 1:
            update_TE = part(x_TI, before=before)
            self.add(update_TE if after is None else after(update_TE), scale=scale)
        elif self._adds_late:
            self.add(part(x_TI, before=before))
        else:
            self._x_TE = part(x_TI, before=before, residual_TO=self._x_TE)

    def add(self, update: Tensor | ExpertSum, *, scale: float = 1.0) -> None:
        """Add `update` * scale; update: (T, E) or an expert sum of that shape."""
        if scale != 1:
            update = (update.total() if isinstance(update, ExpertSum) else update) * scale
        if not self._adds_late:
            self._x_TE = self._x_TE + (update.total() if isinstance(update, ExpertSum) else update)
            return
        if self._update_TE is not None or (isinstance(update, ExpertSum) and self._experts is not None):
            self.total()
        if isinstance(update, ExpertSum):
            self._experts = update
        else:
            self._update_TE = update

    def scale(self, factor: Tensor) -> None:
        """Multiply the stream by a factor, (1,)."""
        self._x_TE = self.total() * factor

    def total(self) -> Tensor:
        """Apply deferred additions and return the sum, (T, E)."""
        if self._experts is not None:
            self._x_TE = self._x_TE + self._experts.total()
        if self._update_TE is not None:
            self._x_TE = self._x_TE + self._update_TE
        self._experts = self._update_TE = None
        return self._x_TE
