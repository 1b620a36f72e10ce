"""Failover: when processes die or freeze, answers equal those of an undisturbed run, token for token."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from itertools import product

import pytest

from core.types.errors import LinkClosed, ReplicaLost
from core.types.failpoint import FailpointStage
from core.types.request import Role, SampledToken, Sampling, SequenceRequest, TokenRules, choice_seed
from router.serving import core
from tests.e2e.conftest import Lab, exact_tree, on_device
from tests.engine.steps import prompts
from tests.support.grids import quick
from tests.support.local_cluster import Answer
from tests.support.rank_in_process import Fault
from tests.support.waiting import WITHIN_S, becomes

_GREEDY = Sampling(max_tokens=40, temperature=0.0)
_RULES = TokenRules(logit_bias=((5, 2.0),), bad_words=((5, 5), (7,)))
_SAMPLED = Sampling(
    max_tokens=40, temperature=1.0, top_p=0.9, repetition_penalty=1.1, num_logprobs=2, token_rules=_RULES
)
_PROMPTS = prompts(20, 33, 47, 70, 35, 64)
_SAMPLINGS = [_GREEDY] * 3 + [replace(_SAMPLED, seed=seed) for seed in range(3)]

_PREFILL_EVENTS = {
    "the request arrives": Fault(FailpointStage.QUEUED),
    "the prompt is half computed": Fault(FailpointStage.COMPUTING, nth=2),
    "the first token is known": Fault(FailpointStage.SAMPLED),
    "the first token is reported": Fault(FailpointStage.COMMITTING),
    "the handoff is acknowledged": Fault(FailpointStage.SHIPPED),
}
_DECODE_EVENTS = {
    "the request arrives": Fault(FailpointStage.QUEUED),
    "its blocks are set aside": Fault(FailpointStage.OPENED),
    "the KV has landed": Fault(FailpointStage.LANDED),
    "the first token is sampled": Fault(FailpointStage.SAMPLED),
    "it streams": Fault(FailpointStage.COMPUTING, nth=12),
}


def _check(answers: list[Answer], expected: list[list[SampledToken]]) -> None:
    """Assert equal tokens, finish reasons and logprobs, without extra or missing tokens."""
    for answer, undisturbed in zip(answers, expected, strict=True):
        ours, theirs = answer.tokens[0], undisturbed
        assert [token.token_id for token in ours] == [token.token_id for token in theirs]
        assert [token.finish_reason for token in ours] == [token.finish_reason for token in theirs]
        for one, other in zip(ours, theirs, strict=True):
            if other.logprob:
                assert one.logprob and one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-4)
                assert [token_id for token_id, _ in one.logprob.top] == [token_id for token_id, _ in other.logprob.top]


_EVENTS = [(Role.PREFILL, event) for event in _PREFILL_EVENTS] + [(Role.DECODE, event) for event in _DECODE_EVENTS]
# The default run has the events beside these.
_SLOW = ("the first token is known", "the request arrives", "its blocks are set aside")
_CASES = [(role, event, number) for role, event in _EVENTS for number in (signal.SIGKILL, signal.SIGSTOP)]
# A frozen process takes seconds to detect.
_QUICK = [one for one in _CASES if one[1] == "it streams" or (one[1] not in _SLOW and one[2] is signal.SIGKILL)]


_ON_GPU = [
    pytest.param(role, event, signal.SIGKILL, "cuda", marks=pytest.mark.gpu)
    for role, event in ((Role.PREFILL, "the prompt is half computed"), (Role.DECODE, "it streams"))
]


@pytest.mark.parametrize(
    ("role", "event", "number", "device"),
    [*quick([(*case, "cpu") for case in _CASES], [(*case, "cpu") for case in _QUICK]), *_ON_GPU],
)
async def test_another_replica_goes_on(lab: Lab, role: Role, event: str, number: signal.Signals, device: str) -> None:
    model_dir = lab.checkpoint("llama")
    expected = lab.reference(model_dir, _PROMPTS, _SAMPLINGS, device=device)
    fault = replace((_PREFILL_EVENTS if role is Role.PREFILL else _DECODE_EVENTS)[event], number=number)
    tree = on_device(device, exact_tree(int(role is Role.DECODE), int(role is Role.PREFILL)))
    async with lab.own(model_dir, processes=True, **tree) as cluster:
        doomed = await cluster.add(role, fault)  # the first of its pool is chosen while all are idle
        await cluster.add(role)
        answers = await cluster.generate_all(_PROMPTS, _SAMPLINGS)
        _check(answers, expected)
        assert doomed.has_been_hit, "the fault never happened"
        assert any(answer.route.attempts > 1 for answer in answers) or role is Role.PREFILL
        if number is signal.SIGSTOP:
            doomed.send(signal.SIGCONT)


async def test_with_no_prefill_replica_left_the_decode_replica_computes_the_prompt(lab: Lab) -> None:
    model_dir = lab.checkpoint("llama")
    async with lab.own(model_dir, processes=True, **exact_tree(0, 1)) as cluster:
        await cluster.add(Role.PREFILL, _PREFILL_EVENTS["the prompt is half computed"])
        answers = await cluster.generate_all(_PROMPTS, _SAMPLINGS)
        _check(answers, lab.reference(model_dir, _PROMPTS, _SAMPLINGS))
        assert {answer.route.prefill_replica for answer in answers} == {""}


async def test_one_death_after_another(lab: Lab) -> None:
    """Three decode replicas die one by one, each a few tokens later; the fourth survives."""
    model_dir = lab.checkpoint("llama")
    async with lab.own(model_dir, processes=True, **exact_tree(1, 0)) as cluster:
        for _ in range(3):
            await cluster.add(Role.DECODE, Fault(FailpointStage.COMPUTING, nth=5))
        await cluster.add(Role.DECODE)
        answers = await cluster.generate_all(_PROMPTS, _SAMPLINGS)
        _check(answers, lab.reference(model_dir, _PROMPTS, _SAMPLINGS))
        assert max(answer.route.migrations for answer in answers) >= 2


@pytest.mark.parametrize(
    ("role", "number"),
    quick(product(Role, [signal.SIGKILL, signal.SIGSTOP]), [(role, signal.SIGKILL) for role in Role]),
)
async def test_one_rank_of_two_is_enough_to_lose_the_replica(lab: Lab, role: Role, number: signal.Signals) -> None:
    model_dir = lab.checkpoint("llama")
    tree = exact_tree(1, 1)
    tree[role.value] |= {"tensor_parallel": 2, "replicas": 0}
    async with lab.own(model_dir, processes=True, **tree) as cluster:
        doomed = await cluster.add(role)
        await cluster.add(role)
        running = asyncio.create_task(cluster.generate_all(_PROMPTS, _SAMPLINGS))
        await cluster.replicas.changed(timeout_s=10)
        doomed.ranks[1].send(number)
        _check(await running, lab.reference(model_dir, _PROMPTS, _SAMPLINGS))
        if number is signal.SIGSTOP:
            doomed.send(signal.SIGKILL)  # the other rank would wait for it before it ends


async def test_choices_that_have_ended_stay_ended(lab: Lab) -> None:
    """One of four choices was stopped by the client. After the replica's death the other three resume one by one."""
    model_dir, sampling = lab.checkpoint("llama"), replace(_SAMPLED, seed=7, num_logprobs=None)
    seeds = [replace(sampling, seed=choice_seed(7, choice)) for choice in range(4)]
    expected = lab.reference.ids(model_dir, [_PROMPTS[1]] * 4, seeds)
    request = SequenceRequest(
        id="r", token_ids=tuple(_PROMPTS[1]), num_prompt_tokens=33, sampling=sampling, choices=(0, 1, 2, 3)
    )
    tokens: dict[int, list[int]] = {choice: [] for choice in range(4)}
    async with lab.own(model_dir, processes=True, **exact_tree(1, 0)) as cluster:
        await cluster.add(Role.DECODE, _DECODE_EVENTS["it streams"])
        await cluster.add(Role.DECODE)
        async with asyncio.timeout(WITHIN_S), cluster.core.start(request) as generation:
            async for arrived in generation:
                before = len(tokens[2])
                for choice, some in arrived.items():
                    tokens[choice] += [token.token_id for token in some]
                if before < 3 <= len(tokens[2]):
                    await generation.stop(2)
        assert [tokens[choice] for choice in (0, 1, 3)] == [expected[choice] for choice in (0, 1, 3)]
        assert tokens[2] == expected[2][: len(tokens[2])] and len(tokens[2]) < 10
        assert generation.route.migrations == 3


async def test_a_request_that_kills_every_replica_is_given_up(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_BACKOFF_S", 0.002)  # a tenth: five pauses take 7 s
    async with lab.own(lab.checkpoint("llama"), processes=True, **exact_tree(1, 0)) as cluster:
        for _ in range(6):  # one more than attempts
            await cluster.add(Role.DECODE, _DECODE_EVENTS["the KV has landed"])
        # Each attempt yields the prefill replica's token, but counts as failed. A broken link may be reported first.
        with pytest.raises((ReplicaLost, LinkClosed)):
            await cluster.generate(_PROMPTS[0], _GREEDY)
        # A process closes its sockets before it counts as dead.
        await becomes(lambda: sum(replica.has_been_hit for replica in cluster.pools[Role.DECODE]) == 5)
