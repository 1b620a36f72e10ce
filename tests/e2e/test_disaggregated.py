"""A cluster with a raw wire generates the same tokens as one process."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from core.types.request import SampledToken, Sampling, choice_seed
from core.types.token_rules import TokenRules
from tests.e2e.conftest import Checkpoint, Reference, gib_of_blocks
from tests.engine.steps import prompts
from tests.support.grids import quick
from tests.support.local_cluster import local_cluster

_GREEDY = Sampling(max_tokens=24, temperature=0.0)


def _tree(*, p_tp: int = 1, d_tp: int = 1, **decode: Any) -> dict[str, Any]:
    return {
        "model": {"dtype": "float32"},
        "kv": {"wire_dtype": "raw"},
        "prefill": {"tensor_parallel": p_tp, "kv_memory_gib": 0.01, "max_batch_tokens": 32},
        "decode": {"tensor_parallel": d_tp, "kv_memory_gib": 0.01, **decode},
        "router": {"max_local_prefill": 0},
    }


def _ids(tokens: list[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


@pytest.mark.parametrize(("p_tp", "d_tp"), quick([(1, 1), (1, 2), (2, 1), (2, 2)], [(1, 2), (2, 1)]))
async def test_greedy_for_any_pair_of_tensor_parallel_sizes(
    checkpoint: Checkpoint, reference: Reference, redis_url: str, p_tp: int, d_tp: int
) -> None:
    model_dir, inputs = checkpoint("llama"), prompts(5, 16, 33, 70, 47, 31)
    expected = [_ids(tokens) for tokens in reference(model_dir, inputs, _GREEDY)]
    async with local_cluster(model_dir, redis_url, **_tree(p_tp=p_tp, d_tp=d_tp)) as cluster:
        answers = await asyncio.gather(*(cluster.generate(p, _GREEDY, id=str(i)) for i, p in enumerate(inputs)))
        assert [answer.ids for answer in answers] == expected
        assert all(answer.route.blocks_shipped for answer in answers)
        await cluster.idle()


async def test_encrypted_blocks_change_no_token(checkpoint: Checkpoint, reference: Reference, redis_url: str) -> None:
    model_dir, inputs = checkpoint("llama"), prompts(5, 70, 47)
    expected = [_ids(tokens) for tokens in reference(model_dir, inputs, _GREEDY)]
    tree = _tree(d_tp=2)
    tree["kv"] |= {"encrypt": True}
    async with local_cluster(model_dir, redis_url, **tree) as cluster:
        answers = await asyncio.gather(*(cluster.generate(p, _GREEDY, id=str(i)) for i, p in enumerate(inputs)))
        assert [answer.ids for answer in answers] == expected
        assert all(answer.route.blocks_shipped for answer in answers)
        await cluster.idle()


async def test_kv_heads_are_replicated_where_there_are_more_ranks_than_heads(
    checkpoint: Checkpoint, reference: Reference, redis_url: str
) -> None:
    model_dir, inputs = checkpoint("llama", num_key_value_heads=1), prompts(20, 35)
    expected = [_ids(tokens) for tokens in reference(model_dir, inputs, _GREEDY)]
    async with local_cluster(model_dir, redis_url, **_tree(p_tp=2, d_tp=4)) as cluster:
        assert [(await cluster.generate(p, _GREEDY)).ids for p in inputs] == expected


async def test_sampled_with_logprobs_penalties_seeds_and_rules(
    checkpoint: Checkpoint, reference: Reference, redis_url: str
) -> None:
    model_dir, inputs = checkpoint("qwen3"), prompts(40, 17)
    sampling = Sampling(
        max_tokens=20, temperature=0.8, top_p=0.9, top_k=50, seed=7, num_logprobs=2, repetition_penalty=1.1
    )
    expected = reference(model_dir, inputs, sampling)
    async with local_cluster(model_dir, redis_url, **_tree()) as cluster:
        for prompt, tokens in zip(inputs, expected, strict=True):
            answer = (await cluster.generate(prompt, sampling)).tokens[0]
            assert _ids(answer) == _ids(tokens)
            for ours, theirs in zip(answer, tokens, strict=True):
                assert ours.logprob and theirs.logprob
                assert [token for token, _ in ours.logprob.top] == [token for token, _ in theirs.logprob.top]
                assert ours.logprob.logprob == pytest.approx(theirs.logprob.logprob, abs=1e-4)

        prompt, plain = inputs[0], _ids(reference(model_dir, inputs[:1], _GREEDY)[0])
        rules = {
            "biased": TokenRules(logit_bias=((5, 100.0), (plain[0], -100.0))),
            "restricted": TokenRules(allowed_token_ids=(3, 9, 27, 81)),
            "without bad words": TokenRules(bad_words=((plain[0],), (plain[-2], plain[-1]))),
        }
        ruled = [replace(one, token_rules=rule) for rule in rules.values() for one in (_GREEDY, sampling)]
        expected = reference(model_dir, [prompt] * len(ruled), ruled)
        answers = await asyncio.gather(*(cluster.generate(prompt, one, id=str(i)) for i, one in enumerate(ruled)))
        assert [answer.ids for answer in answers] == [_ids(tokens) for tokens in expected]
        assert all(answer.route.blocks_shipped for answer in answers)
        biased, restricted, without = (answers[i].ids for i in (0, 2, 4))
        assert set(biased) == {5} and set(restricted) <= {3, 9, 27, 81}
        assert plain[0] not in without and tuple(plain[-2:]) not in pairwise(without)


async def test_several_choices_share_one_handoff(checkpoint: Checkpoint, reference: Reference, redis_url: str) -> None:
    model_dir, prompt = checkpoint("llama"), prompts(37)[0]
    sampling = Sampling(max_tokens=16, temperature=1.0, seed=3)
    seeds = [replace(sampling, seed=choice_seed(3, choice)) for choice in range(4)]
    expected = [_ids(tokens) for tokens in reference(model_dir, [prompt] * 4, seeds)]
    async with local_cluster(model_dir, redis_url, **_tree(d_tp=2)) as cluster:
        answer = await cluster.generate(prompt, sampling, n=4)
        assert [_ids(answer.tokens[choice]) for choice in range(4)] == expected
        assert len({tuple(ids) for ids in expected}) > 1
        assert answer.route.blocks_shipped == 3
        await cluster.idle()


async def test_only_positions_missing_on_the_decode_replica_are_shipped(
    checkpoint: Checkpoint, reference: Reference, redis_url: str
) -> None:
    """In a second turn the decode replica has the first prompt and its answer cached."""
    model_dir, prompt = checkpoint("llama"), prompts(40)[0]
    async with local_cluster(model_dir, redis_url, **_tree()) as cluster:
        first = await cluster.generate(prompt, _GREEDY)
        second_prompt = prompt + first.ids + prompts(9)[0]
        second = await cluster.generate(second_prompt, _GREEDY)
        assert [second.ids] == [_ids(tokens) for tokens in reference(model_dir, [second_prompt], _GREEDY)]
        assert first.route.blocks_shipped == 3
        # 40 + 24 tokens are cached, the last one without KV: 3 full blocks. 73 tokens need 5.
        assert second.route.blocks_shipped == 2
        assert second.route.cached_tokens == 32


async def test_a_short_uncached_part_is_computed_on_the_decode_replica(
    checkpoint: Checkpoint, reference: Reference, redis_url: str
) -> None:
    model_dir, inputs = checkpoint("llama"), prompts(12, 50)
    expected = [_ids(tokens) for tokens in reference(model_dir, inputs, _GREEDY)]
    async with local_cluster(model_dir, redis_url, **_tree() | {"router": {"max_local_prefill": 16}}) as cluster:
        answers = [await cluster.generate(prompt, _GREEDY) for prompt in inputs]
        assert [answer.ids for answer in answers] == expected
        assert [bool(answer.route.prefill_replica) for answer in answers] == [False, True]


async def test_one_token_needs_no_decode_replica(checkpoint: Checkpoint, reference: Reference, redis_url: str) -> None:
    model_dir, prompt = checkpoint("llama"), prompts(40)[0]
    sampling = replace(_GREEDY, max_tokens=1)
    async with local_cluster(model_dir, redis_url, **_tree()) as cluster:
        answer = await cluster.generate(prompt, sampling)
        assert [answer.ids] == [_ids(tokens) for tokens in reference(model_dir, [prompt], sampling)]
        assert (answer.route.decode_replica, answer.route.blocks_shipped) == ("", 0)


async def test_preemption_changes_no_token(checkpoint: Checkpoint, reference: Reference, redis_url: str) -> None:
    """A pool of 20 blocks cannot hold six sequences that grow to 6 blocks each, while the router expects 3 each."""
    model_dir, inputs = checkpoint("llama"), prompts(33, 34, 35, 36, 37, 38)
    rules = TokenRules(logit_bias=((5, 1.0),), bad_words=((5, 5), (7,)))
    sampling = replace(_GREEDY, max_tokens=60, token_rules=rules)
    expected = [_ids(tokens) for tokens in reference(model_dir, inputs, sampling)]
    async with local_cluster(model_dir, redis_url, **_tree(kv_memory_gib=gib_of_blocks(20))) as cluster:
        cluster.core.reservations.finished([1] * 200)  # so short have answers been until now
        answers = await asyncio.gather(*(cluster.generate(p, sampling, id=str(i)) for i, p in enumerate(inputs)))
        assert [answer.ids for answer in answers] == expected
        decode = next(replica for replica in cluster.replicas if replica.id.startswith("decode"))
        assert decode.status.totals.preemptions > 0
        await cluster.idle()
