"""Copies of running answers on an idle prefill replica."""

from __future__ import annotations

import asyncio
import signal

import pytest

from core.index.prefix_index import Depths
from core.types.prefix_hash import block_hashes, root_hash
from core.types.request import Role, Sampling
from router.routing.policies import CostPolicy
from tests.e2e.conftest import Lab, exact_tree
from tests.engine.steps import prompts
from tests.support.local_cluster import LocalCluster
from tests.support.long_answers import Ceiling
from tests.support.rank_in_process import shared_ceiling
from tests.support.waiting import becomes, beside

_BLOCK, _EVERY = 16, 16
_GREEDY = Sampling(max_tokens=80, temperature=0.0)
_SAMPLED = Sampling(max_tokens=80, temperature=1.0, seed=7)


@pytest.mark.parametrize("sampling", [_GREEDY, _SAMPLED], ids=["greedy", "sampled"])
async def test_the_next_turn_finds_the_answer_where_its_prompt_was_computed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    model_dir, prompt = lab.checkpoint("llama"), prompts(40)[0]
    running_on = Ceiling(sampling.max_tokens - 1)
    running_on.arm(monkeypatch.setattr)
    expected = lab.reference.ids(model_dir, [prompt], sampling)[0]
    async with lab.own(model_dir, policy=CostPolicy(prefix_fetches=False), **exact_tree(1, 2)) as cluster:
        async with beside(cluster.core.back_up_forever(every=_EVERY)):
            running = asyncio.create_task(cluster.generate(prompt, sampling))
            most = len(prompt) + len(expected) - 2 * _EVERY  # minimum length of a copy at the end
            await _homes(cluster, [*prompt, *expected], at_least=most // _BLOCK)
            running_on.lift()
            answer = await running
        assert answer.ids == expected
        await cluster.idle()
        prefill = cluster.replicas.get("prefill-0")
        assert prefill
        await cluster.until(lambda: prefill.status.totals.fetched_tokens)
        assert prefill.status.totals.computed_tokens == len(prompt), "a copy is not computed"
        turn = await cluster.generate([*prompt, *answer.ids], Sampling(max_tokens=2, temperature=0.0), id="next")
        assert (turn.route.fetched_tokens, turn.route.prefill_replica) == (0, "prefill-0")
        assert turn.route.cached_tokens >= len(prompt) + len(answer.ids) - 3 * _EVERY


async def test_replacement_computes_the_last_tokens_only(lab: Lab) -> None:
    model_dir, prompt = lab.checkpoint("llama"), prompts(40)[0]
    expected = lab.reference.ids(model_dir, [prompt], _GREEDY)[0]
    running_on = shared_ceiling(40)
    policy = CostPolicy(prefix_fetches=False)
    # Of two prefill replicas, the one with the prompt also keeps the copy.
    async with lab.own(model_dir, processes=True, policy=policy, **exact_tree(2, 0)) as cluster:
        for _ in range(2):
            await cluster.add(Role.DECODE, ceiling=running_on)
        async with beside(cluster.core.back_up_forever(every=_EVERY)):
            running = asyncio.create_task(cluster.generate(prompt, _GREEDY))
            homes = await _homes(cluster, [*prompt, *expected], at_least=(len(prompt) + _EVERY) // _BLOCK)
            busy = next(r.id for r in cluster.replicas if r.member.role is Role.DECODE and r.num_requests)
            next(replica for replica in cluster.pools[Role.DECODE] if replica.id == busy).send(signal.SIGKILL)
            running_on.lift()
            answer = await running
        assert answer.ids == expected
        assert answer.route.migrations == 1
        assert homes == [answer.route.prefill_replica], "it is not to blame for what happened on the decode replica"
        assert answer.route.cached_tokens > len(prompt)


async def _homes(cluster: LocalCluster, tokens: list[int], *, at_least: int) -> list[str]:
    """Wait until the router's index has prefill replicas with `at_least` blocks of a sequence, and return them."""
    hashes = block_hashes(root_hash(cluster.model), tokens, block_size=_BLOCK)
    return await becomes(lambda: _prefix_sources(cluster.replicas.index.depths(hashes), at_least=at_least))


def _prefix_sources(depths: dict[str, Depths], *, at_least: int) -> list[str]:
    return [name for name, depth in depths.items() if name.startswith("prefill") and depth.device >= at_least]
