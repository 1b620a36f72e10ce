"""Replicas with KV pools of unlike sizes, or smaller than the model's context: every request that fits is served."""

from __future__ import annotations

import pytest

from core.model import config as model_config
from core.types.errors import ContextLengthExceeded
from core.types.request import Role, Sampling
from tests.e2e.conftest import Checkpoint, Reference, exact_tree, gib_of_blocks
from tests.engine.steps import prompts
from tests.support.local_cluster import local_cluster
from tests.support.plain_http import http_client
from tests.support.router_service import http_url, router_service

_P, _D = Role.PREFILL, Role.DECODE
_GREEDY = Sampling(max_tokens=6, temperature=0.0)
_LONG = Sampling(max_tokens=60, temperature=1.0, seed=3)

# Pools (role, blocks of 16 tokens), prompt length, sampling; then the indices of the replicas that serve it last.
_CASES = {
    "prompt longer than the prefill replica": ([(_P, 4), (_D, 12)], 100, _GREEDY, None, 1),
    "two unlike prefill replicas": ([(_P, 4), (_P, 12), (_D, 12)], 100, _GREEDY, 1, 2),
    "prompt of exactly the prefill replica": ([(_P, 4), (_D, 12)], 64, _GREEDY, 0, 1),
    "prompt longer than every decode replica": ([(_P, 30), (_D, 4)], 100, _GREEDY, None, 0),
    "answer longer than its replica": ([(_P, 12), (_D, 4), (_D, 12)], 40, _LONG, 0, 2),
    "one token of a prompt that no decode replica holds": (
        [(_P, 12), (_D, 4)], 100, Sampling(max_tokens=1, temperature=0.0), 0, None
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", _CASES)
async def test_the_replicas_that_hold_a_request_serve_it(
    checkpoint: Checkpoint, reference: Reference, redis_url: str, case: str
) -> None:
    """sgl-project/sglang#30233, SemiAnalysisAI/InferenceX#2257"""
    pools, num_tokens, sampling, prefill, decode = _CASES[case]
    model_dir = checkpoint("llama", max_position_embeddings=512)
    [prompt] = prompts(num_tokens)
    [expected] = reference(model_dir, [prompt], sampling)
    tree = exact_tree(0, 0)
    tree["prefill"] |= {"answer_share": 0.5}
    async with local_cluster(model_dir, redis_url, **tree) as cluster:
        replicas = [await cluster.add(role, kv_memory_gib=gib_of_blocks(num_blocks)) for role, num_blocks in pools]
        answer = await cluster.generate(prompt, sampling)
        assert answer.tokens[0] == expected
        names = ["" if index is None else replicas[index].id for index in (prefill, decode)]
        assert [answer.route.prefill_replica, answer.route.decode_replica] == names
        with pytest.raises(ContextLengthExceeded):
            await cluster.generate(prompts(500)[0], sampling)
        await cluster.idle()


async def test_an_answer_grows_from_a_small_replica_to_a_larger_one(
    checkpoint: Checkpoint, reference: Reference, redis_url: str
) -> None:
    """The larger one joins while the smaller one decodes."""
    model_dir = checkpoint("llama", max_position_embeddings=512)
    requests = prompts(40, 63)
    sampling = Sampling(max_tokens=100, temperature=1.0, seed=3)
    expected = reference(model_dir, requests, sampling)
    async with local_cluster(model_dir, redis_url, **exact_tree(0, 0)) as cluster:
        await cluster.add(_D, kv_memory_gib=gib_of_blocks(4))
        await cluster.add(_P, kv_memory_gib=gib_of_blocks(30))
        large = await cluster.add(_D, kv_memory_gib=gib_of_blocks(30))
        cluster.seen(large).reserve(0, 64, 0, 64)  # no room
        for prompt, tokens in zip(requests, expected, strict=True):
            answer = await cluster.generate(prompt, sampling)
            assert answer.tokens[0] == tokens
            assert answer.route.decode_replica == large.id and answer.route.attempts == 2
        cluster.seen(large).reserve(0, -64, 0, -64)
        await cluster.idle()


async def test_clients_see_what_the_pool_holds(checkpoint: Checkpoint, redis_url: str) -> None:
    """vllm-project/vllm#39734, FlashML-org/FreeToken#111, RBLN-SW/vllm-rbln#957"""
    pool = {"kv_memory_gib": 0.00007}
    model_dir = checkpoint("llama")
    async with (
        local_cluster(model_dir, redis_url, model={"dtype": "float32"}, prefill=pool, decode=pool) as cluster,
        router_service(cluster) as service,
        http_client(base_url=http_url(service), timeout=60) as http,
    ):
        limit = (await http.get("/v1/models")).json()["data"][0]["max_model_len"]
        assert limit < model_config.load(model_dir).max_context
        body = {"prompt": [5] * (limit - 8), "ignore_eos": True}
        whole = await http.post("/v1/completions", json={**body, "max_tokens": 8})
        assert whole.status_code == 200 and whole.json()["usage"]["total_tokens"] == limit, whole.text
        for refused in ({**body, "max_tokens": 9}, {"prompt": [5] * limit}):
            answer = await http.post("/v1/completions", json=refused)
            assert answer.status_code == 400 and f"holds {limit} tokens" in answer.json()["error"]["message"]
