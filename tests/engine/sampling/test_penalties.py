"""Penalties on logits: incremental updates, our kernel, and torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.types.request import Sampling
from engine.cpu.library import load_kernels
from engine.sampling import greedy as module
from engine.sampling.greedy import likeliest, penalise
from engine.sampling.penalties import Penalties

V = 3000  # more than two of the kernel's stretches, and not a multiple of them

_samplings = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 1.1, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.3, -1.7]),
    frequency_penalty=st.sampled_from([0.0, 0.1, 2.0]),
).filter(lambda sampling: sampling.has_penalties)


def _by_token(penalties: Penalties) -> dict[int, float]:
    assert len(set(penalties.token_ids.tolist())) == len(penalties) == len(penalties.taken), (
        "each token must be listed once"
    )
    return dict(zip(penalties.token_ids.tolist(), penalties.taken.tolist(), strict=True))


@given(_samplings, st.lists(st.integers(0, 200), max_size=300), st.lists(st.integers(0, 200), max_size=300), st.data())
def test_incremental_penalties_equal_rebuilt_ones(
    sampling: Sampling, prompt: list[int], output: list[int], data: st.DataObject
) -> None:
    tokens = list(prompt)
    kept = Penalties(sampling, tokens, len(prompt))
    while output:
        count = data.draw(st.integers(1, len(output)))
        tokens += output[:count]
        output = output[count:]
        kept.note()
    anew = Penalties(sampling, tokens, len(prompt))
    anew.note()
    assert _by_token(kept) == _by_token(anew)
    outputs = tokens[len(prompt) :]
    has_prompt = sampling.repetition_penalty != 1.0
    assert _by_token(kept).keys() == set(tokens if has_prompt else outputs)
    for token, taken in _by_token(kept).items():
        count = outputs.count(token)
        expected = sampling.presence_penalty + sampling.frequency_penalty * count if count else 0.0
        assert taken == pytest.approx(expected, rel=1e-6)


def _rows(sampling: Sampling, num_rows: int) -> dict[int, Penalties]:
    """Return penalties for two of three rows."""
    numbers = np.random.default_rng(3)
    found = {}
    for row in range(num_rows):
        if row % 3 != 1:
            tokens = numbers.integers(0, V, 100 + 157 * row).tolist()
            found[row] = Penalties(sampling, tokens, 80 + 100 * row)
            found[row].note()
    return found


@pytest.mark.skipif(load_kernels() is None, reason="no C++ compiler")
@settings(max_examples=4 * settings().max_examples)
@given(
    st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.0, 0.0, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 2.0, 0.5, 1.3, 1e38]),
        presence_penalty=st.sampled_from([0.0, 1.0, -1.0, 3e38]),
        frequency_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    ),
    st.sampled_from([1, 100, 1024, 1030, V, 20_000]),
    st.sampled_from([0, 1, 3, 400]),
    st.sampled_from([0, 1, 3, 400]),
    st.sampled_from([1, 3, 40]),
    st.sampled_from([0.0, 4.0, -4.0]),
    st.sampled_from([0.0, -math.inf, math.inf, math.nan]),
    st.integers(0, 1 << 30),
)
def test_kernel_finds_same_token_with_and_without_writing_penalties(
    sampling: Sampling, width: int, num_prompt: int, num_said: int, values: int, lead: float, odd: float, seed: int
) -> None:
    """With few distinct values, so that most logits are equal; with and without a penalty on the greatest."""
    numbers = np.random.default_rng(seed)
    tokens = numbers.integers(0, width, num_prompt).tolist()
    penalties = Penalties(sampling, tokens, num_prompt)
    for token in numbers.integers(0, width, num_said).tolist():
        tokens.append(token)
        penalties.note()
    logits = torch.from_numpy(numbers.integers(-values, values + 1, (1, width)).astype(np.float32))
    logits[0, tokens] += lead
    if odd:
        logits[0, numbers.integers(0, width, 3)] = odd
    theirs = logits.clone()
    best, most = likeliest(logits, {0: penalties})
    penalise(theirs, {0: penalties})
    expected = theirs.argmax(dim=-1)
    assert best.tolist() == expected.tolist()
    torch.testing.assert_close(most, theirs[0, expected].to(most.dtype), rtol=0, atol=0, equal_nan=True)
    if penalties.is_read:
        torch.testing.assert_close(logits, theirs, rtol=0, atol=0, equal_nan=True)


def _logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, V, generator=torch.Generator().manual_seed(1)) * 4


@pytest.mark.skipif(load_kernels() is None, reason="no C++ compiler")
@pytest.mark.parametrize("threads", [1, 2])
def test_kernel_equals_torch_bit_for_bit(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling(repetition_penalty=1.3, presence_penalty=0.37, frequency_penalty=0.21)
    ours, theirs, before = _logits(7), _logits(7), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        best, _ = likeliest(ours, _rows(sampling, 7))
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(module, "open_copies", lambda device: None)
    assert torch.equal(best, likeliest(theirs, _rows(sampling, 7))[0])
    assert torch.equal(ours, theirs) and torch.equal(ours[1], _logits(7)[1]) and not torch.equal(ours, _logits(7))


@pytest.fixture(params=["ours", "torch"])
def _either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(module, "open_copies", lambda device: None)


@pytest.mark.usefixtures("_either")
def test_penalties_equal_their_definition() -> None:
    sampling = Sampling(repetition_penalty=1.3, presence_penalty=0.37, frequency_penalty=0.21)
    logits, penalties = _logits(7), _rows(sampling, 7)
    likeliest(logits, penalties)
    for row, x_V in enumerate(_logits(7).double()):
        if row in penalties:
            for token, taken in _by_token(penalties[row]).items():
                x_V[token] = (x_V[token] / 1.3 if x_V[token] > 0 else x_V[token] * 1.3) - taken
        torch.testing.assert_close(logits[row].double(), x_V, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("width", [1, 15, 16, 64, 1023, 1024, 1025, V])
def test_first_greatest_logit_is_found(width: int) -> None:
    places = sorted({0, 1, 7, 63, 500, 1000, width - 1} & set(range(width)))
    logits = torch.full((len(places), width), -2.0)
    for row, place in enumerate(places):
        logits[row, place] = 5.0
        logits[row, place:] = logits[row, place:].clamp_min(-1.0)
        logits[row, -1] = 5.0  # equal to the greatest
    assert likeliest(logits, {})[0].tolist() == places


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("place", [0, 5, 1030, V - 1])
def test_nan_is_found_first(place: int) -> None:
    logits = _logits(3)
    logits[0, place] = math.nan
    logits[1] = -math.inf
    logits[2, place] = math.inf
    assert likeliest(logits, {})[0].tolist() == [place, 0, place]
