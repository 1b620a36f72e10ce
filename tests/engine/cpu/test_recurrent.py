"""CPU kernels of recurrent layers equal the torch references."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from engine.cpu import recurrent
from engine.cpu.library import Kernels
from engine.kernels.recurrent.linear_recurrence import LinearRecurrence
from tests.engine.kernels.recurrent.recurrent_cases import (
    MIXED,
    ONE_EACH,
    Case,
    check_conv,
    check_norm,
    check_recurrence,
    delta_rule,
    state_space,
)

DTYPES = [torch.float32, torch.bfloat16]
# Outputs in bf16 are rounded once in both.
CLOSE = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, torch.bfloat16: {"atol": 2e-2, "rtol": 1e-2}}
EXACT = {"atol": 1e-5, "rtol": 1e-5}
# With heads of blocks of every width.
WIDE_DELTA_RULE = delta_rule(1, 2, 40, 208)
WIDE_STATE_SPACE = state_space(groups=1, heads=3, state_dim=24, head_dim=80)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [MIXED, ONE_EACH], ids=["mixed", "one"])
@pytest.mark.parametrize(
    "recurrence",
    [delta_rule(), WIDE_DELTA_RULE, state_space(), WIDE_STATE_SPACE],
    ids=["delta", "wide", "ssm", "ssm wide"],
)
def test_recurrence_equals_torch(
    kernels: Kernels, recurrence: LinearRecurrence, case: Case, dtype: torch.dtype
) -> None:
    run = partial(recurrent.linear_recurrence, kernels)
    check_recurrence(run, recurrence, case, dtype=dtype, close=CLOSE[dtype], states_close=EXACT)


@pytest.mark.parametrize("recurrence", [delta_rule(), state_space()], ids=["delta", "ssm"])
def test_strong_decays_stay_exact(kernels: Kernels, recurrence: LinearRecurrence) -> None:
    run, case = partial(recurrent.linear_recurrence, kernels), ([64], [1], [[1]])
    check_recurrence(run, recurrence, case, has_strong_decays=True, close=EXACT, states_close=EXACT)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("activates", [True, False])
def test_conv_equals_torch(kernels: Kernels, width: int, activates: bool, dtype: torch.dtype) -> None:
    run = partial(recurrent.causal_conv, kernels)
    check_conv(run, width, MIXED, dtype=dtype, activates=activates, close=CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gates_first", [True, False])
def test_norm_equals_torch(kernels: Kernels, gates_first: bool, dtype: torch.dtype) -> None:
    run = partial(recurrent.gated_rms_norm, kernels)
    check_norm(run, gates_first=gates_first, dtype=dtype, close=CLOSE[dtype])
