"""Auxiliary hidden states: intermediate layer outputs collected for draft heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# T tokens of the step, M maximum tokens of a captured step, E hidden_size


class AuxHiddenStates:
    """Hidden states collected in one step. Layers that are not requested cost nothing."""

    def __init__(self, layers: Sequence[int]) -> None:
        """layers: numbers of layers after which states are collected; 0: the embedding; all: before the final norm."""
        self._layers = frozenset(layers)
        self._states: dict[int, Tensor] = {}
        # Token ids of the step on the device, set at its start.
        self.token_ids_T: Tensor | None = None

    def wants(self, num_layers: int) -> bool:
        return num_layers in self._layers

    def note(self, num_layers: int, x_TE: Tensor) -> None:
        """Store the states after `num_layers` layers. They must not change until the next step."""
        self._states[num_layers] = x_TE

    def __getitem__(self, num_layers: int) -> Tensor:
        """Return the states (T, E) of a computed step."""
        return self._states[num_layers]


class StaticAuxHiddenStates:
    """Static buffers that captured steps write hidden states to, so that they can be read after a replay."""

    def __init__(
        self, layers: Sequence[int], *, max_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._layers = layers
        self._states = {
            layer: torch.zeros(max_tokens, hidden_size, dtype=dtype, device=device) for layer in frozenset(layers)
        }

    def new(self) -> AuxHiddenStates:
        """Return a collector for a step about to be captured."""
        return AuxHiddenStates(self._layers)

    def keep(self, aux_hidden_states: AuxHiddenStates) -> None:
        """Copy the collected states to the static buffers; part of the capture."""
        for layer, states_ME in self._states.items():
            states_ME[: len(aux_hidden_states[layer])].copy_(aux_hidden_states[layer])

    def of(self, token_ids_T: Tensor) -> AuxHiddenStates:
        """Return the states of the last replayed step, which had these tokens. Valid until the next step."""
        aux_hidden_states = self.new()
        aux_hidden_states.token_ids_T = token_ids_T
        for layer, states_ME in self._states.items():
            aux_hidden_states.note(layer, states_ME[: len(token_ids_T)])
        return aux_hidden_states
