"""Validation of requests at the worker's port, because one invalid request would fail a whole step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from core.rpc import worker_pb2 as pb
from core.types.errors import ContextLengthExceeded, RequestError
from core.types.request import Grammar, GrammarKind, Sampling, SequenceRequest, ThinkingBudget, TokenRules
from frontend.access.access import salt_of
from worker.request_validation import check_request, prefix_source_of

_TEN = tuple(range(10))
_GOOD = SequenceRequest(id="r", token_ids=(1, 9), num_prompt_tokens=2, choices=(0, 3), stream=4)


def test_valid_request_passes() -> None:
    check_request(_GOOD, vocab_size=10, max_tokens=64)
    check_request(replace(_GOOD, salt=salt_of(bytes(32), tenant="acme", cache_salt="s")), vocab_size=10, max_tokens=64)
    check_request(
        replace(_GOOD, sampling=Sampling(temperature=0.0, top_p=0.5, num_logprobs=0)), vocab_size=10, max_tokens=64
    )
    rules = TokenRules(logit_bias=((9, -100.0), (0, 100.0)), allowed_token_ids=_TEN * 102, bad_words=((1, 9),) * 512)
    check_request(replace(_GOOD, sampling=Sampling(token_rules=rules)), vocab_size=10, max_tokens=64)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_ids", ()),
        ("token_ids", (1, 10)),
        ("token_ids", (-1, 1)),
        ("num_prompt_tokens", 0),
        ("num_prompt_tokens", 3),
        ("choices", ()),
        ("choices", (1, 1)),
        ("choices", tuple(range(2000))),
        ("stream", (1 << 63) - 1),
        ("id", ""),
        ("id", "x" * 2000),
        ("salt", "acme"),
        ("salt", "0" * 33),
        ("adapter", "x" * 2000),
        ("thinking", ThinkingBudget(num_tokens=1, is_open=True, opening="<", closing=">", closing_ids=(3, 10))),
        ("grammar", Grammar(kind=GrammarKind.LARK, text="")),
        ("grammar", Grammar(kind=GrammarKind.REGEX, text="a" * 9000)),
        ("grammar", Grammar(kind=GrammarKind.JSON_SCHEMA, text="a" * 70_000)),
    ],
)
def test_invalid_request_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as rejected:
        check_request(replace(_GOOD, **{field: value}), vocab_size=10, max_tokens=64)
    assert rejected.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -1.0),
        ("top_k", -1),
        ("top_p", math.nan),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("num_logprobs", 11),
        ("num_logprobs", -1),
    ],
)
def test_invalid_sampling_names_the_field(field: str, value: Any) -> None:
    request = replace(_GOOD, sampling=replace(Sampling(), **{field: value}))
    with pytest.raises(RequestError) as rejected:
        check_request(request, vocab_size=10, max_tokens=64)
    assert rejected.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", ((10, 1.0),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", ((1, 100.5),)),
        ("logit_bias", ((1, 1.0), (2, math.nan), (3, 1.0))),
        ("logit_bias", ((1, -math.inf),)),
        ("logit_bias", tuple((i, 1.0) for i in range(1025))),
        ("allowed_token_ids", (3, 10)),
        ("allowed_token_ids", _TEN * 103),
        ("bad_words", ((1, 2), ())),
        ("bad_words", ((1, 2), (10,))),
        ("bad_words", (_TEN,) * 103),
    ],
    ids=lambda value: str(value)[:30],
)
def test_token_rules_that_a_step_cannot_keep_name_the_field(field: str, value: Any) -> None:
    request = replace(_GOOD, sampling=Sampling(token_rules=TokenRules(**{field: value})))
    with pytest.raises(RequestError) as rejected:
        check_request(request, vocab_size=10, max_tokens=64)
    assert rejected.value.param == field


def test_too_many_tokens_are_rejected() -> None:
    request = replace(_GOOD, token_ids=(1,) * 65, num_prompt_tokens=65)
    with pytest.raises(ContextLengthExceeded):
        check_request(request, vocab_size=10, max_tokens=64)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "here",
        "here:1",
        "unix:1",
        "unix:///tmp/x:1",
        "dns:///a.b:1",
        "10.0.0.1",
        "10.0.0.1:0",
        "10.0.0.1:99999",
        "::",
    ],
)
def test_prefix_source_must_have_a_plain_address(address: str) -> None:
    prefix_source = pb.PrefixSource(replica="prefill-1", address=address, num_tokens=5)
    with pytest.raises(RequestError) as rejected:
        prefix_source_of(pb.PrefillRequest(prefix_source=prefix_source))
    assert rejected.value.param == "prefix_source.address"


@pytest.mark.parametrize(
    "address", ["10.0.0.1:50051", "::1:443", "[fd00::1]:443", "localhost:1", "node-3.cluster.local:9"]
)
def test_node_addresses_pass(address: str) -> None:
    found = prefix_source_of(pb.GenerateRequest(prefix_source=pb.PrefixSource(replica="decode-1", address=address)))
    assert found and found.address == address
    assert prefix_source_of(pb.GenerateRequest()) is None
