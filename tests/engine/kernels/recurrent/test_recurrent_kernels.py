"""Triton kernels of recurrent layers equal the torch references."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.recurrent.causal_conv import launch_causal_conv
from engine.kernels.recurrent.gated_norm import launch_gated_rms_norm
from engine.kernels.recurrent.linear_recurrence import (
    LinearRecurrence,
    launch_linear_recurrence,
    reference_linear_recurrence,
)
from engine.kernels.recurrent.state_slots import StateSlots
from tests.engine.kernels.pools import DEVICE, DTYPES
from tests.engine.kernels.recurrent.recurrent_cases import (
    MIXED,
    ONE_EACH,
    Case,
    check_conv,
    check_norm,
    check_recurrence,
    delta_rule,
    inputs_of,
    recurrence_states,
    state_space,
    strong_decays,
)

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

slow = pytest.mark.slow
CLOSE = {
    dtype: {"atol": bound, "rtol": bound}
    for dtype, bound in ((torch.float32, 2e-5), (torch.float16, 5e-3), (torch.bfloat16, 3e-2))
}
EXACT = {"atol": 1e-5, "rtol": 1e-5}
# A long sequence whose states are kept inside of chunks too, and a draft.
LONG = ([75, 3], [2, 5], [[*[-1] * 2, 1, *[-1] * 31, 3, *[-1] * 12, 2], [7, 8, 5]])
CASES = [
    (delta_rule(1, 2, 24, 40), LONG),
    *(pytest.param(kind(), case, marks=slow) for kind in (delta_rule, state_space) for case in (LONG, MIXED)),
    *((kind(), ONE_EACH) for kind in (delta_rule, state_space)),
]


@pytest.mark.parametrize(("recurrence", "case"), CASES)
@pytest.mark.parametrize("dtype", DTYPES[:1] + [pytest.param(dtype, marks=slow) for dtype in DTYPES[1:]], ids=str)
def test_recurrence_equals_torch(recurrence: LinearRecurrence, case: Case, dtype: torch.dtype) -> None:
    # Operands of products in chunks are rounded to the rows' dtype.
    states_close = EXACT if dtype == torch.float32 else CLOSE[dtype]
    run = launch_linear_recurrence
    check_recurrence(run, recurrence, case, dtype=dtype, close=CLOSE[dtype], states_close=states_close)


@pytest.mark.parametrize("recurrence", [delta_rule(), state_space()], ids=["delta", "ssm"])
def test_strong_decays_of_the_reference_stay_exact(recurrence: LinearRecurrence) -> None:
    """Sums of large decays would lose the small ones beside them in fp32: chunks equal single tokens."""
    inputs = strong_decays(inputs_of(recurrence, 64))
    whole, single = recurrence_states(recurrence), recurrence_states(recurrence)
    out = reference_linear_recurrence(*inputs, recurrence, whole, StateSlots.of([64], [1], [[1]]))
    for token in range(64):
        one = inputs.of(slice(token, token + 1))
        out_1 = reference_linear_recurrence(*one, recurrence, single, StateSlots.of([1], [1], [[1]]))
        torch.testing.assert_close(out[token : token + 1], out_1, **EXACT)
    torch.testing.assert_close(whole, single, **EXACT)


@slow
@pytest.mark.parametrize("recurrence", [delta_rule(), state_space()], ids=["delta", "ssm"])
def test_strong_decays_stay_exact(recurrence: LinearRecurrence) -> None:
    run, case = launch_linear_recurrence, ([64], [1], [[1]])
    check_recurrence(run, recurrence, case, has_strong_decays=True, close=EXACT, states_close=EXACT)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("case", [LONG, ONE_EACH, pytest.param(MIXED, marks=slow)], ids=["long", "one", "mixed"])
def test_conv_equals_torch(width: int, case: Case, dtype: torch.dtype) -> None:
    check_conv(launch_causal_conv, width, case, dtype=dtype, activates=width == 4, close=CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gates_first", [True, False])
def test_norm_equals_torch(gates_first: bool, dtype: torch.dtype) -> None:
    check_norm(launch_gated_rms_norm, gates_first=gates_first, dtype=dtype, close=CLOSE[dtype])
