"""A cluster with a raw wire generates the same tokens as one process."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from core.types.request import SampledToken, Sampling, TokenRules, choice_seed
from tests.e2e.conftest import Lab, exact_tree, on_device
from tests.engine.steps import prompts
from tests.engine.tiny_models import DEEPSEEK_V2, DEEPSEEK_V3
from tests.support.grids import quick

_GREEDY = Sampling(max_tokens=24, temperature=0.0)
# Family, changes of its configuration, and of the spec.
_KINDS: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "heads": ("llama", {}, {}),
    "one KV head": ("llama", {"num_key_value_heads": 1}, {}),  # replicated on all ranks
    "latents": ("deepseek_v3", DEEPSEEK_V3, {}),
    "experts": ("deepseek_v2", DEEPSEEK_V2, {"decode": {"expert_parallel": True}}),
    "sparse": ("qwen3_moe", {}, {"decode": {"expert_parallel": True}}),
    "encrypted": ("llama", {}, {"kv": {"encrypt": True}}),
}
_BY_DEFAULT = [
    *(("heads", tp) for tp in ((1, 2), (2, 1))),
    *(("one KV head", (2, 4)), ("latents", (2, 1)), ("experts", (1, 2)), ("encrypted", (1, 2))),
]
_SLOW = [("heads", tp) for tp in ((1, 1), (2, 2))] + [("latents", tp) for tp in ((1, 1), (1, 2), (2, 2), (4, 2))]
_ON_GPU = [  # CUDA graphs contain all-reduces over ranks
    *(("heads", tp) for tp in ((1, 1), (1, 2), (2, 2))),
    *(("latents", (1, 1)), ("experts", (1, 2)), ("sparse", (2, 2))),
]


def _ids(tokens: list[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


@pytest.mark.parametrize(
    ("kind", "tp", "device"),
    [
        *quick([(*case, "cpu") for case in _BY_DEFAULT + _SLOW], [(*case, "cpu") for case in _BY_DEFAULT]),
        *(pytest.param(*case, "cuda", marks=pytest.mark.gpu) for case in _ON_GPU),
    ],
)
async def test_greedy_for_any_pair_of_tensor_parallel_sizes(
    lab: Lab, kind: str, tp: tuple[int, int], device: str
) -> None:
    """kind: of what a rank holds of a token, and of what is done to it on the way. tp: of prefill and decode."""
    family, changes, sections = _KINDS[kind]
    model_dir, inputs = lab.checkpoint(family, **changes), prompts(5, 16, 33, 70, 47, 31)
    tree = on_device(device, exact_tree(1, 1, tp=tp))
    for section, fields in sections.items():
        tree[section] |= fields
    expected = lab.reference.ids(model_dir, inputs, _GREEDY, device=device)
    async with lab.shared(model_dir, processes=device == "cuda", **tree) as cluster:
        answers = await cluster.generate_all(inputs, _GREEDY)
        assert [answer.ids for answer in answers] == expected
        assert all(answer.route.blocks_shipped for answer in answers)


@pytest.mark.parametrize("pool_dtype", ["auto", "fp8_e4m3", "int8"])
async def test_8_bit_latents_answer(lab: Lab, pool_dtype: str) -> None:
    """8-bit wires and pools yield a full-length answer. Their accuracy is measured elsewhere."""
    tree = exact_tree(1, 1) | {"kv": {"wire_dtype": "fp8_e4m3", "pool_dtype": pool_dtype}}
    async with lab.shared(lab.checkpoint("deepseek_v3", **DEEPSEEK_V3), **tree) as cluster:
        answer = await cluster.generate(prompts(40)[0], _GREEDY)
        assert len(answer.ids) == 24 and answer.route.blocks_shipped == 3


async def test_sampled_with_logprobs_penalties_seeds_and_rules(lab: Lab) -> None:
    model_dir, inputs = lab.checkpoint("qwen3"), prompts(40, 17)
    sampling = Sampling(
        max_tokens=20, temperature=0.8, top_p=0.9, top_k=50, seed=7, num_logprobs=2, repetition_penalty=1.1
    )
    expected = lab.reference(model_dir, inputs, sampling)
    async with lab.shared(model_dir, **exact_tree(1, 1)) as cluster:
        for prompt, tokens in zip(inputs, expected, strict=True):
            answer = (await cluster.generate(prompt, sampling)).tokens[0]
            assert _ids(answer) == _ids(tokens)
            for ours, theirs in zip(answer, tokens, strict=True):
                assert ours.logprob and theirs.logprob
                assert [token for token, _ in ours.logprob.top] == [token for token, _ in theirs.logprob.top]
                assert ours.logprob.logprob == pytest.approx(theirs.logprob.logprob, abs=1e-4)

        prompt, plain = inputs[0], lab.reference.ids(model_dir, inputs[:1], _GREEDY)[0]
        rules = {
            "biased": TokenRules(logit_bias=((5, 100.0), (plain[0], -100.0))),
            "restricted": TokenRules(allowed_token_ids=(3, 9, 27, 81)),
            "without bad words": TokenRules(bad_words=((plain[0],), (plain[-2], plain[-1]))),
        }
        ruled = [replace(one, token_rules=rule) for rule in rules.values() for one in (_GREEDY, sampling)]
        answers = await cluster.generate_all([prompt] * len(ruled), ruled)
        assert [answer.ids for answer in answers] == lab.reference.ids(model_dir, [prompt] * len(ruled), ruled)
        assert all(answer.route.blocks_shipped for answer in answers)
        biased, restricted, without = (answers[i].ids for i in (0, 2, 4))
        assert set(biased) == {5} and set(restricted) <= {3, 9, 27, 81}
        assert plain[0] not in without and tuple(plain[-2:]) not in pairwise(without)


async def test_several_choices_share_one_handoff(lab: Lab) -> None:
    model_dir, prompt = lab.checkpoint("llama"), prompts(37)[0]
    sampling = Sampling(max_tokens=16, temperature=1.0, seed=3)
    seeds = [replace(sampling, seed=choice_seed(3, choice)) for choice in range(4)]
    expected = lab.reference.ids(model_dir, [prompt] * 4, seeds)
    async with lab.shared(model_dir, **exact_tree(1, 1, tp=(1, 2))) as cluster:
        answer = await cluster.generate(prompt, sampling, n=4)
        assert [_ids(answer.tokens[choice]) for choice in range(4)] == expected
        assert len({tuple(ids) for ids in expected}) > 1
        assert answer.route.blocks_shipped == 3


async def test_only_positions_missing_on_the_decode_replica_are_shipped(lab: Lab) -> None:
    """In a second turn the decode replica has the first prompt and its answer cached."""
    model_dir, prompt = lab.checkpoint("llama"), prompts(40)[0]
    async with lab.shared(model_dir, **exact_tree(1, 1)) as cluster:
        first = await cluster.generate(prompt, _GREEDY)
        second_prompt = prompt + first.ids + prompts(9)[0]
        second = await cluster.generate(second_prompt, _GREEDY)
        assert [second.ids] == lab.reference.ids(model_dir, [second_prompt], _GREEDY)
        assert first.route.blocks_shipped == 3
        # 40 + 24 tokens are cached, the last one without KV: 3 full blocks. 73 tokens need 5.
        assert second.route.blocks_shipped == 2
        assert second.route.cached_tokens == 32


async def test_a_short_uncached_part_is_computed_on_the_decode_replica(lab: Lab) -> None:
    """The replicas are new: once their speed is known, the prefill replica may be the quicker one."""
    model_dir, inputs = lab.checkpoint("llama"), prompts(12, 50)
    expected = lab.reference.ids(model_dir, inputs, _GREEDY)
    async with lab.own(model_dir, **exact_tree(1, 1, max_local_prefill=16)) as cluster:
        answers = [await cluster.generate(prompt, _GREEDY) for prompt in inputs]
        assert [answer.ids for answer in answers] == expected
        assert [bool(answer.route.prefill_replica) for answer in answers] == [False, True]


async def test_one_token_needs_no_decode_replica(lab: Lab) -> None:
    model_dir, prompt = lab.checkpoint("llama"), prompts(40)[0]
    sampling = replace(_GREEDY, max_tokens=1)
    expected = lab.reference.ids(model_dir, [prompt], sampling)
    async with lab.shared(model_dir, **exact_tree(1, 1)) as cluster:
        answer = await cluster.generate(prompt, sampling)
        assert [answer.ids] == expected
        assert (answer.route.decode_replica, answer.route.blocks_shipped) == ("", 0)
