"""Hidden states that somebody else wants of a step, on their way through the layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

# T tokens of the step, E hidden_size


class Taps:
    """Of one step. It costs nothing but what is wanted."""

    def __init__(self, layers: Sequence[int]) -> None:
        """layers: wanted are the states after so many; 0: the embedding; all of them: before the last norm."""
        self._layers = frozenset(layers)
        self._states: dict[int, Tensor] = {}
        self.token_ids_T: Tensor | None = None  # of the step, on the device, from its beginning on

    def wants(self, num_layers: int) -> bool:
        return num_layers in self._layers

    def note(self, num_layers: int, x_TE: Tensor) -> None:
        """Nobody changes them until the next step."""
        self._states[num_layers] = x_TE

    def __getitem__(self, num_layers: int) -> Tensor:
        """(T, E), once the step is computed."""
        return self._states[num_layers]
