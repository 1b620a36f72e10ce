"""A request that would end a step for everybody is refused at the worker's port."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from cluster.words.errors import RequestError
from cluster.words.request import Sampling, SequenceRequest
from cluster.worker.request_check import check_request

_GOOD = SequenceRequest(id="r", token_ids=(1, 9), num_prompt_tokens=2, choices=(0, 3), stream=4)


def test_what_a_router_sends_passes() -> None:
    check_request(_GOOD, vocab_size=10)
    check_request(replace(_GOOD, sampling=Sampling(temperature=0.0, top_p=0.5, num_logprobs=0)), vocab_size=10)


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
    ],
)
def test_what_a_step_cannot_compute_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as refused:
        check_request(replace(_GOOD, **{field: value}), vocab_size=10)
    assert refused.value.param == field


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
def test_how_a_token_cannot_be_chosen_names_the_field(field: str, value: Any) -> None:
    request = replace(_GOOD, sampling=replace(Sampling(), **{field: value}))
    with pytest.raises(RequestError) as refused:
        check_request(request, vocab_size=10)
    assert refused.value.param == field
