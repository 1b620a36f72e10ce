"""Triton kernels of recurrent layers equal the torch references."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.kernels.recurrent.causal_conv import launch_causal_conv, reference_causal_conv
from engine.kernels.recurrent.gated_norm import launch_gated_rms_norm, reference_gated_rms_norm
from engine.kernels.recurrent.linear_recurrence import (
    LinearRecurrence,
    launch_linear_recurrence,
    reference_linear_recurrence,
)
from tests.engine.kernels.pools import DEVICE, DTYPES, random
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

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

slow = pytest.mark.slow
CLOSE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# A long sequence whose states are kept inside of chunks too, and a draft.
LONG = ([75, 3], [2, 5], [[*[-1] * 2, 1, *[-1] * 31, 3, *[-1] * 12, 2], [7, 8, 5]])


def small_delta_rule() -> LinearRecurrence:
    return delta_rule(1, 2, 24, 40)


CASES = [
    (small_delta_rule, LONG),
    pytest.param(delta_rule, LONG, marks=slow),
    pytest.param(state_space, LONG, marks=slow),
    *(pytest.param(kind, MIXED, marks=slow) for kind in (delta_rule, state_space)),
    *((kind, ONE_EACH) for kind in (delta_rule, state_space)),
]


@pytest.mark.parametrize(("kind", "case"), CASES)
@pytest.mark.parametrize("dtype", DTYPES[:1] + [pytest.param(dtype, marks=slow) for dtype in DTYPES[1:]], ids=str)
def test_recurrence_equals_torch(
    kind: Callable[[], LinearRecurrence], case: tuple[list[int], list[int], list[list[int]]], dtype: torch.dtype
) -> None:
    recurrence, slots = kind(), slots_of(case)
    inputs = inputs_of(recurrence, sum(case[0]), dtype)
    ours, theirs = recurrence_states(recurrence), recurrence_states(recurrence)
    got = launch_linear_recurrence(*inputs, recurrence, ours, slots)
    expected = reference_linear_recurrence(*inputs, recurrence, theirs, slots)
    torch.testing.assert_close(got, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])
    # Operands of products in chunks are rounded to the rows' dtype.
    bound = 1e-5 if dtype == torch.float32 else CLOSE[dtype]
    torch.testing.assert_close(ours, theirs, atol=bound, rtol=bound)


@slow
@pytest.mark.parametrize("kind", [delta_rule, state_space])
def test_strong_decays_stay_exact(kind: Callable[[], LinearRecurrence]) -> None:
    recurrence, slots = kind(), slots_of(([64], [1], [[1]]))
    inputs = inputs_of(recurrence, 64)
    inputs.dt_TH[::7] = 80.0
    inputs.dt_TH[1::7] = -9.0
    ours, theirs = recurrence_states(recurrence), recurrence_states(recurrence)
    got = launch_linear_recurrence(*inputs, recurrence, ours, slots)
    expected = reference_linear_recurrence(*inputs, recurrence, theirs, slots)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("case", [LONG, ONE_EACH, pytest.param(MIXED, marks=slow)], ids=["long", "one", "mixed"])
def test_conv_equals_torch(width: int, case: tuple[list[int], list[int], list[list[int]]], dtype: torch.dtype) -> None:
    channels, slots = 83, slots_of(case)
    x_TC = random(sum(case[0]), channels + 3, dtype=dtype)[:, 3:]
    weight_WC, bias_C = random(width, channels, seed=1), random(channels, seed=2)
    arguments = x_TC, weight_WC, bias_C if width == 4 else None
    ours, theirs = (states_of(width - 1, channels, dtype=dtype) for _ in range(2))
    got = launch_causal_conv(*arguments, ours, slots, activates=width == 4)
    expected = reference_causal_conv(*arguments, theirs, slots, activates=width == 4)
    torch.testing.assert_close(got, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gates_first", [True, False])
def test_norm_equals_torch(gates_first: bool, dtype: torch.dtype) -> None:
    x_TGD, z_TGD = random(5, 3, 40, dtype=dtype), random(5, 4, 40, dtype=dtype, seed=1)[:, 1:]
    weight_GD = random(3 if gates_first else 1, 40, dtype=dtype, seed=2).float()
    got = launch_gated_rms_norm(x_TGD, z_TGD, weight_GD, 1e-5, gates_first=gates_first)
    expected = reference_gated_rms_norm(x_TGD, z_TGD, weight_GD, 1e-5, gates_first=gates_first)
    torch.testing.assert_close(got, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])
