"""Processes that die or fall silent under requests: the answers are those of an undisturbed run, token for token."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from typing import Any

import pytest

from cluster.request import Role, SampledToken, Sampling
from tests.e2e.conftest import Checkpoint, Reference
from tests.engine.steps import prompts
from tests.local_cluster import Answer, LocalCluster, local_cluster
from tests.rank_in_process import Fault

_GREEDY = Sampling(max_tokens=40, temperature=0.0)
_SAMPLED = Sampling(max_tokens=40, temperature=1.0, top_p=0.9, repetition_penalty=1.1, num_logprobs=2)
_PROMPTS = prompts(20, 33, 47, 70, 35, 64)
_SAMPLINGS = [_GREEDY] * 3 + [replace(_SAMPLED, seed=seed) for seed in range(3)]

_PREFILL_EVENTS = {
    "the request arrives": Fault("prefill_worker.scheduler:Scheduler.add"),
    "the prompt is half computed": Fault("engine.runner:ModelRunner.forward", call=2),
    "the first token is known": Fault("prefill_worker.worker:sample", after=True),
    "the first token is told": Fault("prefill_worker.rank:PrefillRank.commit"),
    "the handoff is acknowledged": Fault("prefill_worker.worker:Prefiller.shipped"),
}
_DECODE_EVENTS = {
    "the request arrives": Fault("decode_worker.scheduler:Scheduler.add"),
    "its blocks are set aside": Fault("kvtransfer.receiver:Receiver.open", after=True),
    "the KV has landed": Fault("decode_worker.worker:Decoder.landed"),
    "the first token is sampled": Fault("decode_worker.worker:sample", after=True),
    "it streams": Fault("engine.runner:ModelRunner.forward", call=12),
}


def _tree(prefill: int, decode: int, **router: Any) -> dict[str, Any]:
    return {
        "model": {"dtype": "float32"},
        "kv": {"wire_dtype": "raw"},
        "prefill": {"replicas": prefill, "kv_memory_gib": 0.01, "max_batch_tokens": 32},
        "decode": {"replicas": decode, "kv_memory_gib": 0.01},
        "router": {"max_local_prefill": 0} | router,
    }


async def _ask(cluster: LocalCluster) -> list[Answer]:
    asked = [
        cluster.generate(prompt, sampling, id=str(number))
        for number, (prompt, sampling) in enumerate(zip(_PROMPTS, _SAMPLINGS, strict=True))
    ]
    async with asyncio.timeout(30):
        return await asyncio.gather(*asked)


def _check(answers: list[Answer], expected: list[list[SampledToken]]) -> None:
    """The same tokens, ends and logprobs; a token more or less would show as well."""
    for answer, undisturbed in zip(answers, expected, strict=True):
        ours, theirs = answer.tokens[0], undisturbed
        assert [token.token_id for token in ours] == [token.token_id for token in theirs]
        assert [token.finish_reason for token in ours] == [token.finish_reason for token in theirs]
        for one, other in zip(ours, theirs, strict=True):
            if other.logprob:
                assert one.logprob and one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-4)
                assert [token_id for token_id, _ in one.logprob.top] == [token_id for token_id, _ in other.logprob.top]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize(
    ("role", "event"),
    [(Role.PREFILL, event) for event in _PREFILL_EVENTS] + [(Role.DECODE, event) for event in _DECODE_EVENTS],
)
async def test_another_replica_goes_on(
    checkpoint: Checkpoint, reference: Reference, redis_url: str, role: Role, event: str, number: signal.Signals
) -> None:
    model_dir = checkpoint("llama")
    expected = reference(model_dir, _PROMPTS, _SAMPLINGS)
    fault = replace((_PREFILL_EVENTS if role is Role.PREFILL else _DECODE_EVENTS)[event], number=number)
    others = {Role.PREFILL: 1, Role.DECODE: 1} | {role: 0}
    tree = _tree(others[Role.PREFILL], others[Role.DECODE])
    async with local_cluster(model_dir, redis_url, processes=True, **tree) as cluster:
        doomed = await cluster.add(
            role, fault, log="/tmp/chaos-notes/doomed.log"
        )  # the first of its pool: it is chosen while all are idle
        await cluster.add(role, log="/tmp/chaos-notes/other.log")
        answers = await _ask(cluster)
        _check(answers, expected)
        assert doomed.has_been_hit, "the fault never happened"
        assert any(answer.route.attempts > 1 for answer in answers) or role is Role.PREFILL
        if number is signal.SIGSTOP:
            doomed.send(signal.SIGCONT)
        await cluster.idle(timeout_s=2.0)
