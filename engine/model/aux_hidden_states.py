"""Hidden states that somebody else wants of a step, on their way through the layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# T tokens of the step, M of the largest that is recorded, E hidden_size


class AuxHiddenStates:
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


class StaticAuxHiddenStates:
    """Where recorded steps leave hidden states that somebody wants, so that they can be found when one is replayed."""

    def __init__(
        self, layers: Sequence[int], *, max_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._layers = layers
        self._states = {
            layer: torch.zeros(max_tokens, hidden_size, dtype=dtype, device=device) for layer in frozenset(layers)
        }

    def new(self) -> AuxHiddenStates:
        """For a step that is about to be recorded."""
        return AuxHiddenStates(self._layers)

    def keep(self, aux_hidden_states: AuxHiddenStates) -> None:
        """It has been computed: also this is recorded."""
        for layer, states_ME in self._states.items():
            states_ME[: len(aux_hidden_states[layer])].copy_(aux_hidden_states[layer])

    def of(self, token_ids_T: Tensor) -> AuxHiddenStates:
        """Of these tokens, whose step was replayed last: until the next one."""
        aux_hidden_states = self.new()
        aux_hidden_states.token_ids_T = token_ids_T
        for layer, states_ME in self._states.items():
            aux_hidden_states.note(layer, states_ME[: len(token_ids_T)])
        return aux_hidden_states
