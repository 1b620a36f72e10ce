"""Draft tokens: from logits, against sums in fp64; equal to the model's samples; acceptance rates match the theory."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from core.types.request import Sampling
from engine.sampling.params import SamplingRow
from engine.sampling.sampler import sample, uniform
from engine.scheduler.sequence import Sequence
from engine.spec_decode.draft_models import draft_sampler
from engine.spec_decode.draft_models.draft_sampler import (
    DRAWN,
    GREEDY,
    LIKELIEST,
    NUM_DEGREES,
    DraftSampler,
    Draws,
    draw_drafts,
)
from tests.engine.engine_requests import Asked, sequence_of

_DRAWS = 10_000
_VOCAB = 40


def _sequences(temperature: float) -> list[Sequence]:
    asked = [Asked([1, 2, 3], Sampling(temperature=temperature, seed=seed, max_tokens=9)) for seed in range(_DRAWS)]
    return [sequence_of(one, "0", block_size=8) for one in asked]


def _logits() -> tuple[Tensor, Tensor]:
    """Return the logits of a model, and of a draft model."""
    generator = torch.Generator().manual_seed(1)
    target_V = torch.randn(_VOCAB, generator=generator) * 2
    return target_V, target_V + torch.randn(_VOCAB, generator=generator) * 0.3


def _shares(logits_V: Tensor, temperature: float) -> Tensor:
    return (logits_V.double() / temperature).softmax(-1)


def _chi_square(ids: list[int], shares_V: Tensor) -> float:
    """Return the statistic in standard deviations (Wilson and Hilferty 1931). Rare tokens are pooled."""
    counts_V = torch.bincount(torch.tensor(ids), minlength=len(shares_V)).double()
    is_rare = shares_V * len(ids) < 10
    expected = torch.cat([shares_V[~is_rare], shares_V[is_rare].sum()[None]]) * len(ids)
    found = torch.cat([counts_V[~is_rare], counts_V[is_rare].sum()[None]])
    freedom = len(expected) - 1
    statistic = float(((found - expected) ** 2 / expected.clamp_min(1e-9)).sum())
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


@pytest.mark.parametrize(("temperature", "place"), [(0.7, 0), (1.0, 2)])
def test_acceptance_matches_theory(temperature: float, place: int) -> None:
    target_V, draft_V = _logits()
    sequences = _sequences(temperature)
    drawn = DraftSampler().draw(draft_V.repeat(_DRAWS, 1), sequences, place)
    drafted = [token[0] for token in drawn if token]
    rows = [sequence.sampling_row.behind(place) for sequence in sequences]
    chosen = [one[0] for one in sample(target_V.repeat(_DRAWS, 1), rows).wait() if one]
    p_V, q_V = _shares(target_V, temperature), _shares(draft_V, temperature)
    assert _chi_square(chosen, p_V) < 4, "sampled tokens must follow the target's distribution"
    assert _chi_square(drafted, q_V) < 4
    assert _chi_square(drafted, p_V) > 6, "the test must distinguish the distributions"
    # Tokens are equal if the number falls into the intervals of both.
    ends_p, ends_q = p_V.cumsum(0), q_V.cumsum(0)
    both = torch.minimum(ends_p, ends_q) - torch.maximum(ends_p - p_V, ends_q - q_V)
    theory = float(both.clamp_min(0).sum())
    found = sum(one == other for one, other in zip(drafted, chosen, strict=True)) / _DRAWS
    assert abs(found - theory) < 4 * math.sqrt(theory * (1 - theory) / _DRAWS)
    independent = float((p_V * q_V).sum())
    assert found > independent + 0.1


def test_greedy_draft_is_likeliest_with_its_confidence() -> None:
    _, draft_V = _logits()
    sequences = _sequences(0.0)[:2]
    share = float(_shares(draft_V, 1.0).max())
    expected = (int(draft_V.argmax()), int(share * NUM_DEGREES))
    found = DraftSampler().draw(draft_V.repeat(2, 1), sequences, 0)
    assert [one and (one.token, one.kind) for one in found] == [expected] * 2
    sure_V = torch.full((_VOCAB,), -1e4).index_fill(0, torch.tensor([7]), 0.0)
    (one,) = DraftSampler().draw(sure_V[None].clone(), sequences[:1], 0)
    assert one and (one.token, one.kind) == (7, NUM_DEGREES - 1)
    (one,) = DraftSampler().draw(sure_V[None].clone(), _sequences(1.0)[:1], 0)
    assert one and (one.token, one.kind) == (7, 2 * NUM_DEGREES - 1), "sampled tokens must have their own kinds"


def test_ids_of_logits_are_looked_up() -> None:
    """In greedy rows, and beside rows that sample."""
    _, draft_V = _logits()
    for sequences in (_sequences(0.0)[:2], [*_sequences(0.0)[:2], _sequences(1.0)[0]]):
        logits_RV = draft_V.repeat(len(sequences), 1)
        found = DraftSampler().draw(logits_RV, sequences, 1, ids_V=torch.arange(_VOCAB) * 3)
        assert [one and one.token for one in found[:2]] == [3 * int(draft_V.argmax())] * 2


def test_no_token_for_nan_logits() -> None:
    logits_RV = torch.zeros(3, _VOCAB)
    logits_RV[1] = math.nan
    found = DraftSampler().draw(logits_RV, _sequences(0.0)[:3], 0)
    assert found[1] is None and found[0] and found[2]


@pytest.mark.parametrize(("sureness", "expected"), [(1.0, "drawn"), (0.3, "likeliest")])
def test_sampler_learns_sampled_or_likeliest(sureness: float, expected: str) -> None:
    """A draft similar to the model samples like it; a less certain one is right more often with its likeliest token."""
    generator = torch.Generator().manual_seed(4)
    sequences, drawn = _sequences(1.0)[:24], DraftSampler()
    kinds: list[str] = []
    for _ in range(40):
        target_RV = torch.randn(len(sequences), _VOCAB, generator=generator) * 3
        draft_RV = target_RV + torch.randn(target_RV.shape, generator=generator) * 0.05
        found = drawn.draw(draft_RV * sureness, sequences, 0)
        kinds = ["likeliest" if token and token[1] >= 2 * NUM_DEGREES else "drawn" for token in found]
        chosen = sample(target_RV, [sequence.sampling_row for sequence in sequences]).wait()
        for sequence, token in zip(sequences, chosen, strict=True):
            assert token
            sequence.tokens.append(token[0])
    assert set(kinds) == {expected}


# R rows, V vocabulary

_SIZES = [2, 15, 16, 17, 33, 64, 65, 4928, 49_152]
# Distance in the distribution at which fp32 may choose the neighbour.
_NEAR = 1e-5


@pytest.fixture(params=["kernel", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(draft_sampler, "open_copies", lambda _: None)
    return str(request.param)


def _row(temperature: float, seed: int = 0, **filters: float) -> SamplingRow:
    sampling = Sampling(temperature=temperature, seed=seed, max_tokens=9, **filters)  # type: ignore[arg-type]
    return SamplingRow(sampling=sampling, seed=seed, tokens=[1, 2, 3], num_prompt_tokens=3)


def _greedy(logits_RV: Tensor) -> Draws:
    rows = [_row(0.0)] * len(logits_RV)
    return draw_drafts(logits_RV, rows, [GREEDY] * len(rows))


def _exact_shares(logits_V: Tensor, temperature: float) -> NDArray[np.float64]:
    return np.asarray((logits_V.double() / temperature).softmax(-1).numpy())


def _check_drawn(logits_V: Tensor, row: SamplingRow, kind: int, tokens: Seq[int], share: float) -> None:
    likeliest, drawn, drafted = tokens
    temperature, number = row.sampling.temperature, uniform(row.seed, row.position)
    shares_V = _exact_shares(logits_V, temperature)
    ends_V = shares_V.cumsum()
    assert shares_V[likeliest] >= shares_V.max() * (1 - _NEAR)
    assert ends_V[drawn] - shares_V[drawn] - _NEAR <= number <= ends_V[drawn] + _NEAR and shares_V[drawn] > 0
    assert drafted == (likeliest if kind == LIKELIEST else drawn)
    assert share == pytest.approx(shares_V[drafted], abs=_NEAR, rel=1e-3)


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 5.0])
@pytest.mark.parametrize("size", _SIZES)
def test_sampled_rows_get_drawn_token(size: int, temperature: float, way: str) -> None:
    generator = torch.Generator().manual_seed(size)
    logits_RV = 3 * torch.randn(24, size, generator=generator)
    logits_RV[1, 1:] -= 50
    logits_RV[2, : size // 2] = -math.inf
    rows, kinds = [_row(temperature, seed) for seed in range(24)], [DRAWN, LIKELIEST] * 12
    found = draw_drafts(logits_RV.clone(), rows, kinds)
    for each in zip(logits_RV, rows, kinds, found.tokens_R3.tolist(), found.shares_R.tolist(), strict=True):
        _check_drawn(*each)


@given(
    values=st.lists(st.sampled_from([-math.inf, -90.0, -2.0, 0.0, 1.5, 40.0]), min_size=2, max_size=150),
    seed=st.integers(0, 9999),
    temperature=st.sampled_from([1e-30, 0.3, 1.0, 50.0]),
    kind=st.sampled_from([DRAWN, LIKELIEST]),
)
def test_draws_of_arbitrary_distributions(values: list[float], seed: int, temperature: float, kind: int) -> None:
    assume(max(values) > -math.inf)
    row, logits_V = _row(temperature, seed), torch.tensor(values)
    found = draw_drafts(logits_V[None].clone(), [row], [kind])
    _check_drawn(logits_V, row, kind, found.tokens_R3[0].tolist(), found.shares_R[0].tolist())


def test_filters_apply_to_draft_tokens(way: str) -> None:
    logits_RV = torch.randn(60, 500, generator=torch.Generator().manual_seed(3))
    filters: list[dict[str, float]] = [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.5}, {}]
    rows = [_row(1.0, seed, **filters[seed % 4]) for seed in range(60)]
    found = draw_drafts(logits_RV.clone(), rows, [DRAWN] * 60)
    drawn = [one[0] for one in sample(logits_RV.clone(), rows).wait() if one]
    assert found.tokens_R3[:, 1].tolist() == found.tokens_R3[:, 2].tolist() == drawn


def test_greedy_rows_beside_sampled_rows(way: str) -> None:
    logits_RV = torch.randn(6, 300, generator=torch.Generator().manual_seed(2))
    logits_RV[4, 7] = math.nan
    rows = [_row(float(i % 2), i) for i in range(6)]
    found = draw_drafts(logits_RV.clone(), rows, [GREEDY, LIKELIEST, GREEDY, DRAWN, GREEDY, DRAWN])
    alone = _greedy(logits_RV[::2].clone())
    assert torch.equal(found.tokens_R3[[0, 2]], alone.tokens_R3[:2])
    torch.testing.assert_close(found.shares_R[[0, 2]], alone.shares_R[:2])
    assert (found.tokens_R3[:, 1] >= 0).tolist() == [True, True, True, True, False, True]
    for i, kind in ((1, LIKELIEST), (3, DRAWN), (5, DRAWN)):
        _check_drawn(logits_RV[i], rows[i], kind, found.tokens_R3[i].tolist(), found.shares_R[i].tolist())


@pytest.mark.parametrize("size", _SIZES)
def test_greedy_rows_get_the_likeliest_token(size: int, way: str) -> None:
    logits_RV = 3 * torch.randn(9, size, generator=torch.Generator().manual_seed(size))
    logits_RV[1, : size // 2] = -math.inf
    logits_RV[2] *= 100
    before_RV = logits_RV.clone()
    found = _greedy(logits_RV)
    assert torch.equal(logits_RV, before_RV)
    shares_RV = logits_RV.double().softmax(-1)
    first_R1 = shares_RV.argmax(-1, keepdim=True)
    assert torch.equal(found.tokens_R3, first_R1.expand(-1, 3))
    torch.testing.assert_close(found.shares_R, shares_RV.max(-1).values.float(), atol=1e-5, rtol=1e-4)


@given(st.lists(st.sampled_from([-math.inf, -2.0, 0.0, 1.5]), min_size=2, max_size=70))
def test_ties_go_to_the_first_tokens(values: list[float]) -> None:
    found = _greedy(torch.tensor([values]))
    (ids,) = found.tokens_R3.tolist()
    if max(values) > -math.inf:
        assert ids == [values.index(max(values))] * 3 and found.shares_R.isfinite().all()
    else:
        assert ids[1] < 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 16, 39])
def test_non_finite_logits_mark_only_their_row(value: float, place: int, temperature: float, way: str) -> None:
    logits_RV = torch.randn(4, 40, generator=torch.Generator().manual_seed(1))
    logits_RV[1, place] = value
    logits_RV[3] = -math.inf
    kind = DRAWN if temperature else GREEDY
    found = draw_drafts(logits_RV, [_row(temperature, i) for i in range(4)], [kind] * 4)
    assert (found.tokens_R3[:, 1] >= 0).tolist() == [True, False, True, False]
    assert ((found.tokens_R3[:, [0, 2]] >= 0) & (found.tokens_R3[:, [0, 2]] < 40)).all()
