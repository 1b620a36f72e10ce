"""Recurrent layers: inputs, filled state pools, and the comparison of kernels with the torch references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels.recurrent.causal_conv import reference_causal_conv
from engine.kernels.recurrent.gated_norm import reference_gated_rms_norm
from engine.kernels.recurrent.linear_recurrence import LinearRecurrence, reference_linear_recurrence
from engine.kernels.recurrent.state_slots import StateSlots
from tests.engine.kernels.pools import DEVICE, random

NUM_SLOTS = 12
# Tokens of each sequence, the slot that it reads, and the slots for the states after its last tokens.
MIXED = ([1, 70, 3, 0, 17, 129, 1], [3, -1, 5, 2, 0, 4, -1], [[3], [1], [7, 8, 5], [], [0], [4], [9]])
ONE_EACH = ([1, 1, 1], [3, 0, -1], [[3], [2], [1]])


Case = tuple[list[int], list[int], list[list[int]]]
Run = Callable[..., Tensor]
Close = dict[str, float]


def slots_of(case: Case) -> StateSlots:
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


def strong_decays(inputs: Inputs) -> Inputs:
    inputs.dt_TH[::7] = 80.0
    inputs.dt_TH[1::7] = -9.0
    return inputs


def states_of(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 6) -> Tensor:
    """Make states with gaps between slots."""
    return random(NUM_SLOTS, 2, *shape, dtype=dtype, seed=seed)[:, 1]


def recurrence_states(recurrence: LinearRecurrence) -> Tensor:
    return states_of(recurrence.num_heads, recurrence.key_dim, recurrence.value_dim)


def check_recurrence(
    run: Run,
    recurrence: LinearRecurrence,
    case: Case,
    *,
    dtype: torch.dtype = torch.float32,
    has_strong_decays: bool = False,
    close: Close,
    states_close: Close,
) -> None:
    slots, inputs = slots_of(case), inputs_of(recurrence, sum(case[0]), dtype)
    if has_strong_decays:
        inputs = strong_decays(inputs)
    ours, theirs = recurrence_states(recurrence), recurrence_states(recurrence)
    got = run(*inputs, recurrence, ours, slots)
    torch.testing.assert_close(got, reference_linear_recurrence(*inputs, recurrence, theirs, slots), **close)
    torch.testing.assert_close(ours, theirs, **states_close)


def check_conv(run: Run, width: int, case: Case, *, dtype: torch.dtype, activates: bool, close: Close) -> None:
    channels, slots = 83, slots_of(case)
    x_TC = random(sum(case[0]), channels + 3, dtype=dtype)[:, 3:]
    weight_WC, bias_C = random(width, channels, seed=1), random(channels, seed=2)
    arguments: Any = x_TC, weight_WC, bias_C if activates else None
    ours, theirs = (states_of(width - 1, channels, dtype=dtype) for _ in range(2))
    got = run(*arguments, ours, slots, activates=activates)
    expected = reference_causal_conv(*arguments, theirs, slots, activates=activates)
    torch.testing.assert_close(got, expected, **close)
    assert torch.equal(ours, theirs)


def check_norm(run: Run, *, gates_first: bool, dtype: torch.dtype, close: Close) -> None:
    x_TGD, z_TGD = random(5, 3, 40, dtype=dtype), random(5, 4, 40, dtype=dtype, seed=1)[:, 1:]
    weight_GD = random(3 if gates_first else 1, 40, dtype=dtype, seed=2).float()
    got = run(x_TGD, z_TGD, weight_GD, 1e-5, gates_first=gates_first)
    expected = reference_gated_rms_norm(x_TGD, z_TGD, weight_GD, 1e-5, gates_first=gates_first)
    torch.testing.assert_close(got, expected, **close)
