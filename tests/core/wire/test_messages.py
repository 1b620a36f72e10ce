"""Messages round-trip with every field, set or absent."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from core.rpc import worker_pb2 as pb
from core.types.constraints import Grammar, GrammarKind
from core.types.errors import RequestError
from core.types.handoff import Handoff, PrefixSource
from core.types.request import DraftTally, FinishReason, SampledToken, Sampling, SequenceRequest, TokenLogprob
from core.types.step_timing import StepTiming
from core.types.thinking_budget import ThinkingBudget
from core.types.token_rules import TokenRules
from core.wire import messages

_SAMPLING = Sampling(
    max_tokens=3,
    min_tokens=1,
    temperature=0.5,
    top_k=4,
    top_p=0.75,
    min_p=0.25,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=2.0,
    seed=2**63 - 1,
    stop_token_ids=(5, 6),
    num_logprobs=0,
    token_rules=TokenRules(logit_bias=((3, -100.0), (7, 0.5)), allowed_token_ids=(9, 2), bad_words=((1,), (2, 3))),
)
_FULL = SequenceRequest(
    id="r",
    token_ids=(1, 2, 3),
    num_prompt_tokens=2,
    sampling=_SAMPLING,
    choices=(1, 2),
    stream=7,
    salt="s",
    adapter="a",
    priority=-1,
    deadline_s=1.5,
    grammar=Grammar(kind=GrammarKind.REGEX, text="a+"),
    num_prompt_logprobs=0,
    thinking=ThinkingBudget(num_tokens=0, is_open=True, opening="<a>", closing="</a>", closing_ids=(3, 4)),
)
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
        id="h",
        epoch=2,
        replica="d",
        ranks=("a:1", "b:2"),
        layout="l",
        num_tokens=9,
        max_tokens=12,
        first_token=8,
        ttl_s=1.5,
    )
    prefix_source = PrefixSource(replica="p", address="a:1", num_tokens=16)
    timing = StepTiming(base_s=1.0, token_s=2.0, pair_s=3.0, context_s=4.0)
    assert messages.handoff_from_proto(messages.handoff_to_proto(handoff)) == handoff
    assert messages.prefix_source_from_proto(messages.prefix_source_to_proto(prefix_source)) == prefix_source
    sent = messages.timing_to_proto(timing)
    assert sent and messages.timing_from_proto(sent) == timing and messages.timing_to_proto(None) is None


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
