"""The two likeliest tokens, and how likely they are: what a softmax and two searches say."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine import likeliest
from engine.likeliest import likeliest_two

# R rows, V vocabulary

_CPU = torch.device("cpu")
_SIZES = [2, 15, 16, 17, 33, 4928, 49_152]


def _expected(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    shares_RV = logits_RV.double().softmax(-1)
    first_R1 = shares_RV.argmax(-1, keepdim=True)
    second_R1 = logits_RV.scatter(-1, first_R1, -math.inf).argmax(-1, keepdim=True)
    ids_R2 = torch.cat((first_R1, second_R1), -1)
    return ids_R2, shares_RV.gather(-1, ids_R2).float()


@pytest.mark.parametrize("by_torch", [False, True], ids=["kernel", "torch"])
@pytest.mark.parametrize("size", _SIZES)
def test_two_searches_in_one(size: int, by_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_torch:
        monkeypatch.setattr(likeliest, "open_copies", lambda _: None)
    logits_RV = 3 * torch.randn(9, size, generator=torch.Generator().manual_seed(size))
    logits_RV[1, : size // 2] = -math.inf
    logits_RV[2] *= 100
    before_RV = logits_RV.clone()
    ids_R2, shares_R2 = likeliest_two(logits_RV)
    assert torch.equal(logits_RV, before_RV)
    expected_R2, wanted_R2 = _expected(logits_RV)
    assert torch.equal(ids_R2, expected_R2)
    torch.testing.assert_close(shares_R2, wanted_R2, atol=1e-5, rtol=1e-4)


@given(st.lists(st.sampled_from([-math.inf, -2.0, 0.0, 1.5]), min_size=2, max_size=70))
def test_of_equal_ones_the_first_two(values: list[float]) -> None:
    [ids], [shares] = likeliest_two(torch.tensor([values]))
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if max(values) > -math.inf:
        assert ids[0] == order[0] and values[int(ids[1])] == values[order[1]] and ids[1] != ids[0]
        assert shares.isfinite().all() and shares[0] >= shares[1]
    else:
        assert not shares.isfinite().any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 16, 39])
def test_what_is_no_number_says_so_in_its_own_row(value: float, place: int) -> None:
    logits_RV = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    logits_RV[1, place] = value
    ids_R2, shares_R2 = likeliest_two(logits_RV)
    assert shares_R2.isfinite().all(-1).tolist() == [True, False, True]
    assert ((ids_R2 >= 0) & (ids_R2 < 40)).all()
