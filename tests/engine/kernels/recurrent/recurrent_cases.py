"""Inputs of recurrent layers: packed sequences, parameters and filled state pools."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.recurrent.linear_recurrence import LinearRecurrence
from engine.kernels.recurrent.state_slots import StateSlots
from tests.engine.kernels.pools import DEVICE, random

NUM_SLOTS = 12
# Tokens of each sequence, the slot that it reads, and the slots for the states after its last tokens.
MIXED = ([1, 70, 3, 0, 17, 129, 1], [3, -1, 5, 2, 0, 4, -1], [[3], [1], [7, 8, 5], [], [0], [4], [9]])
ONE_EACH = ([1, 1, 1], [3, 0, -1], [[3], [2], [1]])


def slots_of(case: tuple[list[int], list[int], list[list[int]]]) -> StateSlots:
    return StateSlots.of(*case, device=DEVICE)


class Inputs(NamedTuple):
    rows_TC: Tensor
    dt_TH: Tensor
    beta_TH: Tensor | None

    def of(self, rows: slice) -> Inputs:
        return Inputs(self.rows_TC[rows], self.dt_TH[rows], None if self.beta_TH is None else self.beta_TH[rows])


def delta_rule(key_heads: int = 2, heads: int = 6, key_dim: int = 24, value_dim: int = 48) -> LinearRecurrence:
    rate_H, dt_bias_H = random(heads, seed=1).exp(), random(heads, seed=2)
    return LinearRecurrence(key_heads, heads, key_dim, value_dim, rate_H, dt_bias_H)


def state_space(groups: int = 2, heads: int = 4, state_dim: int = 40, head_dim: int = 32) -> LinearRecurrence:
    recurrence = delta_rule(groups, heads, state_dim, head_dim)
    return replace(recurrence, is_delta=False, skip_H=random(heads, seed=3), min_dt=0.05, max_dt=1.5)


def inputs_of(recurrence: LinearRecurrence, num_tokens: int, dtype: torch.dtype = torch.float32) -> Inputs:
    """Make rows that are columns of a wider projection."""
    keys = recurrence.num_key_heads * recurrence.key_dim
    channels = 2 * keys + recurrence.num_heads * recurrence.value_dim
    rows = random(num_tokens, channels + 5, dtype=dtype, seed=4)[:, 5:]
    heads = random(num_tokens, 2 * recurrence.num_heads, dtype=dtype, seed=5)
    dt_TH, beta_TH = heads.chunk(2, dim=-1)
    return Inputs(rows, dt_TH, beta_TH if recurrence.is_delta else None)


def states_of(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 6) -> Tensor:
    """Make states with gaps between slots."""
    return random(NUM_SLOTS, 2, *shape, dtype=dtype, seed=seed)[:, 1]


def recurrence_states(recurrence: LinearRecurrence) -> Tensor:
    return states_of(recurrence.num_heads, recurrence.key_dim, recurrence.value_dim)
