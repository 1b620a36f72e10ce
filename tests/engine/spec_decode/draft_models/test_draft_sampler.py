"""DraftSampler: draft tokens equal the model's samples, and acceptance rates match the theory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from core.types.request import Sampling
from engine.sampling.sampler import sample
from engine.scheduler.sequence import Sequence
from engine.spec_decode.draft_models.draft_sampler import NUM_DEGREES, DraftSampler
from tests.engine.asked import Asked, sequence_of
from tests.engine.chi_square import chi_square

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


@pytest.mark.parametrize(("temperature", "place"), [(0.7, 0), (1.0, 2)])
def test_acceptance_matches_theory(temperature: float, place: int) -> None:
    target_V, draft_V = _logits()
    sequences = _sequences(temperature)
    drawn = DraftSampler().draw(draft_V.repeat(_DRAWS, 1), sequences, place)
    drafted = [token[0] for token in drawn if token]
    rows = [sequence.sampling_row.behind(place) for sequence in sequences]
    chosen = [one[0] for one in sample(target_V.repeat(_DRAWS, 1), rows).wait() if one]
    p_V, q_V = _shares(target_V, temperature), _shares(draft_V, temperature)
    assert chi_square(chosen, p_V) < 4, "sampled tokens must follow the target's distribution"
    assert chi_square(drafted, q_V) < 4
    assert chi_square(drafted, p_V) > 6, "the test must distinguish the distributions"
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
