"""Sampling kernel compared with the sampler's torch path, independent of the batch."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from core.types.request import Sampling
from engine.kernels.sample import NO_LOGIT_IS_FINITE, NOT_FINITE, launch_choice, launch_log_norms
from engine.sampling import sampler
from engine.sampling.params import SamplingRow
from tests.engine.kernels.pools import DEVICE
from tests.support.grids import quick

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

V = 1100 if DEVICE.type == "cpu" else 151_937
# Several tiles per row in the interpreter too.
_SMALL = 512


def _rows(samplings: list[Sampling], seed: int = 0) -> list[SamplingRow]:
    return [
        SamplingRow(sampling=sampling, seed=seed + i, tokens=[1, 2], num_prompt_tokens=2)
        for i, sampling in enumerate(samplings)
    ]


def _logits(num_rows: int, seed: int, *, is_rounded: bool = False) -> Tensor:
    """Return logits; is_rounded: rounded to bf16, with many ties, as in a bf16 model."""
    x = torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed)) * 3
    x[:, ::7] = -math.inf
    return (x.bfloat16().float() if is_rounded else x).to(DEVICE)


def _chosen(logits_RV: Tensor, rows: list[SamplingRow], block: int = _SMALL) -> list[int]:
    numbers = np.array([sampler.numbers_of(row) for row in rows], dtype=np.int32)
    chosen: list[int] = launch_choice(logits_RV, torch.from_numpy(numbers).to(DEVICE), block=block).tolist()
    return chosen


@pytest.mark.parametrize(
    ("temperature", "is_rounded"), quick([(0.3, True), (1.0, False), (2.0, True)], [(0.3, True), (1.0, False)])
)
def test_draws_equal_reference(temperature: float, is_rounded: bool) -> None:
    limits = [*product((0, 7, 300), (1.0, 0.9, 0.3), (0.0, 0.05)), (1, 0.5, 0.0), (V, 1e-6, 0.0), (1 << 40, 0.99, 1.0)]
    rows = _rows([Sampling(temperature=temperature, top_k=k, top_p=p, min_p=m) for k, p, m in limits])
    logits = _logits(len(rows), seed=int(temperature * 10), is_rounded=is_rounded)
    expected = sampler.reference_draw(logits.cpu(), rows).tolist()
    chosen = _chosen(logits, rows)
    # A fp32 sum may be within rounding of a draw, which then selects the neighbour.
    num_others = sum(one != other for one, other in zip(chosen, expected, strict=True))
    assert num_others <= (0 if DEVICE.type == "cpu" else 1), num_others


def test_choice_depends_on_its_own_row_only() -> None:
    rows = _rows([Sampling(temperature=0.8, top_p=0.9, seed=i) for i in range(5)] + [Sampling(temperature=0.0)])
    logits = _logits(6, seed=1)
    together = _chosen(logits, rows)
    assert together == [_chosen(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert together[5] == int(logits[5].argmax())
    # Rows that are not contiguous.
    spread = torch.cat([logits, logits], dim=1)[:, :V]
    assert _chosen(spread, rows) == together


@pytest.mark.parametrize("draws", [True, False])
def test_non_finite_logits_have_distinct_error_codes(draws: bool) -> None:
    rows = _rows([Sampling(temperature=float(draws), top_p=0.9)] * 5)
    logits = _logits(5, seed=2)
    logits[0, 5], logits[1, 5], logits[2], logits[3, :] = math.nan, math.inf, -math.inf, 1.0
    chosen = _chosen(logits, rows)
    assert chosen[:3] == [NOT_FINITE, NOT_FINITE, NO_LOGIT_IS_FINITE]
    assert 0 <= chosen[3] < V and logits[4, chosen[4]].isfinite()
    if not draws:
        assert chosen[3] == 0, "ties select the first token"
        assert launch_choice(logits, None, block=_SMALL).tolist() == chosen


@pytest.mark.parametrize(("draw", "chosen"), [(0.0, 2), (1 - 2.0**-48, 4)])
def test_extreme_draws_select_allowed_tokens(draw: float, chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda seed, position: draw)
    logits = torch.tensor([[-9.0, -9.0, 1.0, 1.1, 1.2, -9.0]], device=DEVICE)
    assert _chosen(logits, _rows([Sampling(top_k=3)])) == [chosen]


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_extreme_temperatures(temperature: float) -> None:
    logits = _logits(20, seed=3)
    chosen = _chosen(logits, _rows([Sampling(temperature=temperature)] * 20))
    assert all(logits[i, token].isfinite() for i, token in enumerate(chosen))
    assert (chosen == logits.argmax(-1).tolist()) == (temperature < 1)


# NumPy warns in the interpreter.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_log_norms_equal_torch() -> None:
    logits = _logits(4, seed=4)
    logits[1, 3], logits[2] = math.nan, -math.inf
    norms = launch_log_norms(logits).squeeze(-1)
    torch.testing.assert_close(norms[[0, 3]], logits[[0, 3]].logsumexp(-1), atol=1e-5, rtol=1e-6)
    assert not norms[1:3].isfinite().any()


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the sampler launches it for a GPU's logits")
def test_sampler_on_gpu_equals_cpu() -> None:
    """With every sampling option, and log-probabilities."""
    samplings = [
        Sampling(temperature=0.0, num_logprobs=3),
        Sampling(temperature=0.7, top_k=20, top_p=0.9, num_logprobs=0),
        Sampling(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5),
        Sampling(temperature=1.0, min_tokens=5, stop_token_ids=(7,)),
    ]
    for seed in range(20):
        rows, logits = _rows(samplings, seed=10 * seed), _logits(len(samplings), seed=seed)
        theirs = sampler.sample(logits.cpu(), rows).wait()
        ours = sampler.sample(logits, rows).wait()
        for one, other in zip(ours, theirs, strict=True):
            assert one is not None and other is not None and one[0] == other[0]
            if other[1]:
                assert one[1] is not None
                assert one[1].logprob == pytest.approx(other[1].logprob, abs=1e-4)
                assert [i for i, _ in one[1].top] == [i for i, _ in other[1].top]
