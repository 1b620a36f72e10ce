"""Prompt log-probabilities round-trip in parts, and invalid ones are rejected."""

from __future__ import annotations

import numpy as np
import pytest

from core.rpc import worker_pb2 as pb
from core.types.errors import TransferError
from core.types.prompt_logprobs import PromptLogprobs
from core.wire.messages import prompt_logprobs_from_proto, prompt_logprobs_to_proto

_VOCABULARY = 100


def _logprobs(num_tokens: int, num_top: int) -> PromptLogprobs:
    draw = np.random.default_rng(num_tokens)
    return PromptLogprobs.of(
        -draw.random(num_tokens, np.float32),
        draw.integers(1, _VOCABULARY + 1, num_tokens, np.int32),
        draw.integers(0, _VOCABULARY, (num_tokens, num_top), np.int32),
        -draw.random((num_tokens, num_top), np.float32),
    )


@pytest.mark.parametrize(("num_tokens", "num_top"), [(0, 2), (1, 0), (40_000, 0), (9000, 20)])
def test_round_trip_in_messages_of_bounded_size(num_tokens: int, num_top: int) -> None:
    sent = _logprobs(num_tokens, num_top)
    messages = [message.SerializeToString() for message in prompt_logprobs_to_proto(sent)]
    assert all(len(message) < 1 << 20 for message in messages) and bool(messages) == bool(num_tokens)
    parts = [
        prompt_logprobs_from_proto(pb.PromptLogprobs.FromString(message), num_top=num_top, vocab_size=_VOCABULARY)
        for message in messages
    ]
    whole = PromptLogprobs.joined(parts, num_top=num_top)
    for ours, theirs in zip(whole.columns, sent.columns, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def _floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def _ints(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprobs": _floats(-1.0)},
        {"logprobs": _floats(-1.0, 0.5)},
        {"logprobs": _floats(-1.0, float("nan"))},
        {"logprobs": _floats(-1.0, -1.0)[:-1]},
        {"ranks": _ints(1)},
        {"ranks": _ints(1, 0)},
        {"ranks": _ints(1, _VOCABULARY + 1)},
        {"top_ids": _ints(1, 2, 3, 4)},
        {"top_ids": _ints(1, -1)},
        {"top_ids": _ints(1, _VOCABULARY)},
        {"top_logprobs": _floats(float("nan"), -1.0)},
        {"top_logprobs": b""},
    ],
    ids=str,
)
def test_impossible_values_are_rejected(wrong: dict[str, bytes]) -> None:
    right = {"logprobs": _floats(-1.0, float("-inf")), "ranks": _ints(1, _VOCABULARY), "top_ids": _ints(0, 99),
             "top_logprobs": _floats(0.0, -0.5)}  # fmt: skip
    assert len(prompt_logprobs_from_proto(pb.PromptLogprobs(**right), num_top=1, vocab_size=_VOCABULARY)) == 2
    with pytest.raises(TransferError):
        prompt_logprobs_from_proto(pb.PromptLogprobs(**(right | wrong)), num_top=1, vocab_size=_VOCABULARY)
