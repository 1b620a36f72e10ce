"""Answers of SmolLM2 to random schemas, half of them sampled: each is a valid or cut instance of its schema.

They are the same on every topology, and when replicas die. This needs `engine.deterministic`: without it, one of a
thousand float32 answers differed between replicas, because a row's rounding depends on its batch, which can change a
sampled token.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from core.grammar.compiler import GrammarCompiler
from core.types.failpoint import FailpointStage
from core.types.request import FinishReason, Grammar, GrammarKind, Role, Sampling
from engine.cpu.library import open_kernels
from frontend.text.tokenizer import Tokenizer
from tests.e2e.conftest import Lab, exact_tree
from tests.support.generated_schemas import Schema, schemas
from tests.support.local_cluster import Answer, LocalCluster, LocalReplica
from tests.support.public_schemas import public_schemas
from tests.support.rank_in_process import Fault

pytestmark = pytest.mark.skipif(
    open_kernels(dtype=torch.bfloat16, device=torch.device("cpu")) is None, reason="no C++ compiler here"
)
_MAX_ANSWER = 40  # tokens
_WAVE = 125  # concurrent requests, because larger steps cost little more
_EVERY = 2  # in every second wave an added replica of each role dies
_DYING = {  # during the wave's answers, each time a little later
    Role.PREFILL: [
        Fault(milestone, nth) for nth in (3, 5) for milestone in (FailpointStage.COMMITTING, FailpointStage.SHIPPED)
    ],
    Role.DECODE: [
        Fault(milestone, nth) for nth in (6, 14) for milestone in (FailpointStage.SAMPLED, FailpointStage.COMPUTING)
    ],
}
_PROMPTS = [
    f"{thing}, as JSON: " for thing in ("A thing", "What the shop of my uncle has", "Tomorrow", "The first of many")
]


@dataclass(frozen=True)
class _Request:
    number: int
    schema: Schema
    prompt: list[int]
    sampling: Sampling

    @property
    def grammar(self) -> Grammar:
        return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(self.schema))


@pytest.mark.slow
@pytest.mark.timeout(1700)
async def test_answers_to_a_thousand(smollm2_dir: Path, lab: Lab) -> None:
    requests = _make_requests(Tokenizer(smollm2_dir), schemas(1000))
    pair = await _answers(lab, smollm2_dir, requests, 1, 1)
    print("ended:", dict(_check(smollm2_dir, requests, pair)))
    assert _ids(await _answers(lab, smollm2_dir, requests, 0, 1)) == _ids(pair)
    assert _ids(await _answers(lab, smollm2_dir, requests, 2, 2, kills=True)) == _ids(pair)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_answers_to_public_schemas(smollm2_dir: Path, lab: Lab) -> None:
    tokenizer = Tokenizer(smollm2_dir)
    taken, rejected = public_schemas(GrammarCompiler(smollm2_dir, vocab_size=tokenizer.vocab_size))
    print(f"{len(taken)} schemas are taken, {sum(rejected.values())} are refused:")
    print(*(f"{count:4d} {why}" for why, count in sorted(rejected.items(), key=lambda of: -of[1])), sep="\n")
    assert len(taken) > 200
    requests = _make_requests(tokenizer, taken)
    pair = await _answers(lab, smollm2_dir, requests, 1, 1)
    print("ended:", dict(_check(smollm2_dir, requests, pair)))
    assert _ids(await _answers(lab, smollm2_dir, requests, 0, 1)) == _ids(pair)


def _make_requests(tokenizer: Tokenizer, drawn: list[Schema]) -> list[_Request]:
    """Alternate between greedy and sampled requests."""
    common: dict[str, Any] = {"max_tokens": _MAX_ANSWER, "stop_token_ids": tuple(tokenizer.eos_token_ids)}
    prompts = [tokenizer.encode(prompt) for prompt in _PROMPTS]
    return [
        _Request(i, schema, prompts[i % len(prompts)], Sampling(temperature=float(i // 2 % 2), seed=i, **common))
        for i, schema in enumerate(drawn)
    ]


async def _answers(
    lab: Lab, model_dir: Path, requests: list[_Request], prefill: int, decode: int, *, kills: bool = False
) -> list[Answer]:
    """Generate all answers. prefill 0: decode replicas compute the prompts. kills: additional replicas join and die."""
    tree = exact_tree(prefill, decode) | {"timeouts": {"queue_s": 600}}
    tree |= {"model": {"dtype": "bfloat16"}, "engine": {"deterministic": True}}
    for role in Role:
        tree[role] |= {"kv_memory_gib": 0.4, "max_batch_tokens": 256}
    tree["decode"]["max_running"] = _WAVE
    begin, answers, dead = time.monotonic(), list[Answer](), list[LocalReplica]()
    async with lab.own(model_dir, processes=True, **tree) as cluster:
        others: list[LocalReplica] = []
        for number, first in enumerate(range(0, len(requests), _WAVE)):
            if kills and number % _EVERY == 0:
                faults = {role: _DYING[role][number // _EVERY % len(_DYING[role])] for role in Role}
                others = await asyncio.gather(*(cluster.add(role, fault) for role, fault in faults.items()))
            answers += await asyncio.gather(*(_generate(cluster, one) for one in requests[first : first + _WAVE]))
            dead += [other for other in others if other not in dead and other.has_been_hit]
    went_on = sum(answer.route.migrations > 0 for answer in answers)
    again = sum(answer.route.attempts > 1 for answer in answers)
    print(
        f"{prefill}P{decode}D, {len(answers)} answers in {time.monotonic() - begin:.0f} s: {len(dead)} replicas died,"
        f" {again} answers took several attempts, {went_on} of them from where they were"
    )
    if kills:
        assert {other.id.partition("-")[0] for other in dead} == set(Role), "the faults never happened"
        assert went_on, "no answer was half written when its replica died"
    return answers


async def _generate(cluster: LocalCluster, requests: _Request) -> Answer:
    return await cluster.generate(requests.prompt, requests.sampling, id=str(requests.number), grammar=requests.grammar)


def _ids(answers: list[Answer]) -> list[list[int]]:
    return [answer.ids for answer in answers]


def _check(model_dir: Path, requests: list[_Request], answers: list[Answer]) -> Counter[FinishReason | None]:
    """Assert that a separately compiled grammar allows each token, and that uncut answers are instances."""
    tokenizer = Tokenizer(model_dir)
    compiler = GrammarCompiler(model_dir, vocab_size=tokenizer.vocab_size)
    ends: Counter[FinishReason | None] = Counter()
    for one, answer in zip(requests, answers, strict=True):
        ends[reason := answer.tokens[0][-1].finish_reason] += 1
        mask = compiler.compile(one.grammar).mask(one.sampling.stop_token_ids)
        for length, token in enumerate(answer.ids):
            assert mask.allowed(answer.ids[:length], 0)[token // 32] >> token % 32 & 1, (one, answer.ids)
        if reason is FinishReason.LENGTH:
            assert len(answer.ids) == _MAX_ANSWER
        else:
            assert reason is FinishReason.STOP
            _check_instance(one.schema, tokenizer.decode(answer.ids[:-1]))
    assert ends[FinishReason.STOP] > len(requests) / 8, "hardly any has come to its end"
    return ends


def _check_instance(schema: Schema, text: str) -> None:
    """Validate with decimals, because in fp64 0.07 is not a multiple of 0.01."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    draft = validator_for(exact, default=Draft202012Validator)
    draft(exact, format_checker=draft.FORMAT_CHECKER).validate(json.loads(text, parse_float=_number))


def _number(text: str) -> Decimal | float:
    try:
        return Decimal(text)
    except InvalidOperation:  # the exponent exceeds the range of Decimal
        return float(text)
