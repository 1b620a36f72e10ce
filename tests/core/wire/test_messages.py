"""Messages round-trip with every field, set or absent; impossible values are rejected or cleared."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from core.rpc import worker_pb2 as pb
from core.types.errors import RequestError, TransferError
from core.types.handoff import Handoff, PrefixSource
from core.types.prompt_logprobs import PromptLogprobs
from core.types.request import (
    DraftTally,
    FinishReason,
    Grammar,
    GrammarKind,
    SampledToken,
    Sampling,
    SequenceRequest,
    ThinkingBudget,
    TokenLogprob,
    TokenRules,
)
from core.types.step_timing import StepTiming
from core.wire import messages
from core.wire.messages import make_plausible, prompt_logprobs_from_proto, prompt_logprobs_to_proto

_SAMPLING = Sampling(
    max_tokens=3, min_tokens=1, temperature=0.5, top_k=4, top_p=0.75, min_p=0.25, repetition_penalty=1.5,
    presence_penalty=-0.5, frequency_penalty=2.0, seed=2**63 - 1, stop_token_ids=(5, 6), num_logprobs=0,
    token_rules=TokenRules(logit_bias=((3, -100.0), (7, 0.5)), allowed_token_ids=(9, 2), bad_words=((1,), (2, 3))),
)  # fmt: skip
_FULL = SequenceRequest(
    id="r", token_ids=(1, 2, 3), num_prompt_tokens=2, sampling=_SAMPLING, choices=(1, 2), stream=7, salt="s",
    adapter="a", priority=-1, deadline_s=1.5, grammar=Grammar(kind=GrammarKind.REGEX, text="a+"),
    num_prompt_logprobs=0,
    thinking=ThinkingBudget(num_tokens=0, is_open=True, opening="<a>", closing="</a>", closing_ids=(3, 4)),
)  # fmt: skip
_BARE = SequenceRequest(id="r", token_ids=(1,), num_prompt_tokens=1)


@pytest.mark.parametrize("request_", [_FULL, _BARE], ids=["full", "bare"])
def test_sequence_round_trips(request_: SequenceRequest) -> None:
    message = pb.Sequence.FromString(messages.sequence_to_proto(request_).SerializeToString())
    assert messages.sequence_from_proto(message) == request_


def test_unknown_grammar_kind_is_rejected() -> None:
    message = pb.Sequence(id="r", token_ids=[1], num_prompt_tokens=1, grammar=pb.Grammar(kind="verse", text="a"))
    with pytest.raises(RequestError) as rejected:
        messages.sequence_from_proto(message)
    assert rejected.value.param == "grammar"


def test_every_field_but_the_user_is_sent() -> None:
    def names(kind: type) -> set[str]:
        return {field.name for field in fields(kind)}

    assert names(TokenRules) == {field.name for field in pb.TokenRules.DESCRIPTOR.fields}
    assert names(ThinkingBudget) == {field.name for field in pb.ThinkingBudget.DESCRIPTOR.fields}
    assert names(Sampling) == {field.name for field in pb.Sampling.DESCRIPTOR.fields}
    assert names(SequenceRequest) - {field.name for field in pb.Sequence.DESCRIPTOR.fields} == {
        "user",
        "traceparent",  # sent as call metadata
    }


def test_handoff_prefix_source_and_timing_round_trip() -> None:
    handoff = Handoff(
        id="h", epoch=2, replica="d", ranks=("a:1", "b:2"), layout="l", num_tokens=9, max_tokens=12, first_token=8,
        ttl_s=1.5,
    )  # fmt: skip
    prefix_source = PrefixSource(replica="p", address="a:1", num_tokens=16)
    timing = StepTiming(base_s=1.0, token_s=2.0, pair_s=3.0, context_s=4.0)
    assert messages.from_message(Handoff, messages.to_message(pb.Handoff, handoff)) == handoff
    assert messages.from_message(PrefixSource, messages.to_message(pb.PrefixSource, prefix_source)) == prefix_source
    assert messages.from_message(StepTiming, messages.to_message(pb.StepTiming, timing)) == timing


def test_tokens_round_trip() -> None:
    logprob = TokenLogprob(logprob=-0.5, top=((3, -0.5), (4, -1.0)))
    tokens = [SampledToken(token_id=3, logprob=logprob, finish_reason=FinishReason.STOP), SampledToken(token_id=0)]
    assert messages.tokens_from_proto(messages.tokens_to_proto(tokens)) == tokens


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        ({"steps": 9, "drafts": 3, "unguessed": 2, "drafted": 20, "accepted": 7, "floors": 1.5}, {}),
        ({"steps": 4, "drafts": 9, "unguessed": 9, "drafted": 5}, {"drafts": 4, "unguessed": 0}),
        ({"steps": 3, "drafts": 1, "unguessed": 9, "drafted": 5}, {"unguessed": 2}),
        ({"steps": 1, "drafts": 1, "drafted": 5, "accepted": 6}, {"accepted": 5}),
        ({"steps": 2, "drafts": 2, "drafted": 2**32 - 1, "accepted": 2**32 - 1}, {"drafted": 128, "accepted": 128}),
        ({"steps": 2**32 - 1}, {"steps": 256}),
        ({"steps": 2, "floors": float("nan")}, {"floors": 0.0}),
        ({"steps": 2, "floors": float("inf")}, {"floors": 0.0}),
        ({"steps": 2, "floors": -1.0}, {"floors": 0.0}),
        ({"steps": 2, "floors": 3.0}, {}),  # no draft could pay off
        ({"steps": 2, "floors": 1e300}, {"floors": 2000.0}),
        ({"drafted": 5, "accepted": 5}, {"drafted": 0, "accepted": 0}),
    ],
)
def test_implausible_draft_tally_is_clamped(sent: dict[str, Any], taken: dict[str, Any]) -> None:
    """The client still gets the token."""
    message = pb.SampledToken(token_id=3, drafts=pb.DraftTally(**sent))
    (token,) = messages.tokens_from_proto([message])
    assert token == SampledToken(token_id=3, drafts=DraftTally(**(sent | taken)))


_VOCABULARY = 100


def _logprobs(num_tokens: int, num_top: int) -> PromptLogprobs:
    draw = np.random.default_rng(num_tokens)
    return PromptLogprobs(
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


_NONSENSE = [math.nan, math.inf, -math.inf, -1.0, 1e300, 5e-324]


def _status() -> pb.Status:
    return pb.Status(
        replica="decode-0",
        running=3,
        prefill_tokens_per_s=100.0,
        decode_step_s=0.02,
        timing=pb.StepTiming(base_s=0.01, token_s=1e-5, pair_s=1e-9),
        totals=pb.Totals(transfer_seconds=1.5, transfers=2),
    )


def test_plausible_values_stay() -> None:
    for status in (_status(), pb.Status()):
        before = pb.Status.FromString(status.SerializeToString())
        assert make_plausible(status)
        assert status == before


@pytest.mark.parametrize("number", _NONSENSE)
@pytest.mark.parametrize("field", ["prefill_tokens_per_s", "decode_step_s", "link_bytes_per_s", "host_bytes_per_s"])
def test_implausible_values_are_cleared(field: str, number: float) -> None:
    status = _status()
    setattr(status, field, number)
    assert not make_plausible(status)
    assert getattr(status, field) == 0.0 and status.running == 3 and status.HasField("timing")


@pytest.mark.parametrize("number", _NONSENSE)
def test_implausible_timing_is_cleared(number: float) -> None:
    status = _status()
    status.timing.pair_s = number
    assert not make_plausible(status)
    assert not status.HasField("timing") and status.decode_step_s == 0.02


def test_implausible_totals_are_cleared() -> None:
    status = _status()
    status.totals.transfer_seconds = math.nan
    assert not make_plausible(status)
    assert status.totals.transfer_seconds == 0.0 and status.totals.transfers == 2
