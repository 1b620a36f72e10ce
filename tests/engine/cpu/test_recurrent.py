"""CPU kernels of recurrent layers equal the torch references."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.cpu import recurrent
from engine.cpu.library import Kernels
from engine.kernels.recurrent.causal_conv import reference_causal_conv
from engine.kernels.recurrent.gated_norm import reference_gated_rms_norm
from engine.kernels.recurrent.linear_recurrence import LinearRecurrence, reference_linear_recurrence
from tests.engine.kernels.pools import random
from tests.engine.kernels.recurrent.recurrent_cases import (
    MIXED,
    ONE_EACH,
    delta_rule,
    inputs_of,
    recurrence_states,
    slots_of,
    state_space,
    states_of,
)

DTYPES = [torch.float32, torch.bfloat16]
# Outputs in bf16 are rounded once in both.
CLOSE = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, torch.bfloat16: {"atol": 2e-2, "rtol": 1e-2}}


def wide_delta_rule() -> LinearRecurrence:
    """Heads of blocks of every width."""
    return delta_rule(1, 2, 40, 208)


def wide_state_space() -> LinearRecurrence:
    return state_space(groups=1, heads=3, state_dim=24, head_dim=80)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [MIXED, ONE_EACH], ids=["mixed", "one"])
@pytest.mark.parametrize("kind", [delta_rule, wide_delta_rule, state_space, wide_state_space])
def test_recurrence_equals_torch(
    kernels: Kernels,
    kind: Callable[[], LinearRecurrence],
    case: tuple[list[int], list[int], list[list[int]]],
    dtype: torch.dtype,
) -> None:
    recurrence, slots = kind(), slots_of(case)
    inputs = inputs_of(recurrence, sum(case[0]), dtype)
    ours, theirs = recurrence_states(recurrence), recurrence_states(recurrence)
    got = recurrent.linear_recurrence(kernels, *inputs, recurrence, ours, slots)
    expected = reference_linear_recurrence(*inputs, recurrence, theirs, slots)
    torch.testing.assert_close(got, expected, **CLOSE[dtype])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [delta_rule, state_space])
def test_strong_decays_stay_exact(kernels: Kernels, kind: Callable[[], LinearRecurrence]) -> None:
    recurrence, slots = kind(), slots_of(([64], [1], [[1]]))
    inputs = inputs_of(recurrence, 64)
    inputs.dt_TH[::7] = 80.0
    inputs.dt_TH[1::7] = -9.0
    ours, theirs = recurrence_states(recurrence), recurrence_states(recurrence)
    got = recurrent.linear_recurrence(kernels, *inputs, recurrence, ours, slots)
    expected = reference_linear_recurrence(*inputs, recurrence, theirs, slots)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("activates", [True, False])
def test_conv_equals_torch(kernels: Kernels, width: int, activates: bool, dtype: torch.dtype) -> None:
    channels, slots = 83, slots_of(MIXED)
    x_TC = random(sum(MIXED[0]), channels + 3, dtype=dtype)[:, 3:]
    weight_WC, bias_C = random(width, channels, seed=1), random(channels, seed=2)
    arguments = x_TC, weight_WC, bias_C if activates else None
    ours, theirs = (states_of(width - 1, channels, dtype=dtype) for _ in range(2))
    got = recurrent.causal_conv(kernels, *arguments, ours, slots, activates=activates)
    expected = reference_causal_conv(*arguments, theirs, slots, activates=activates)
    torch.testing.assert_close(got, expected, **CLOSE[dtype])
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gates_first", [True, False])
def test_norm_equals_torch(kernels: Kernels, gates_first: bool, dtype: torch.dtype) -> None:
    x_TGD, z_TGD = random(5, 3, 40, dtype=dtype), random(5, 4, 40, dtype=dtype, seed=1)[:, 1:]
    weight_GD = random(3 if gates_first else 1, 40, dtype=dtype, seed=2).float()
    got = recurrent.gated_rms_norm(kernels, x_TGD, z_TGD, weight_GD, 1e-5, gates_first=gates_first)
    expected = reference_gated_rms_norm(x_TGD, z_TGD, weight_GD, 1e-5, gates_first=gates_first)
    torch.testing.assert_close(got, expected, **CLOSE[dtype])
