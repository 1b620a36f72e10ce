"""Layers with a window in a cluster whose pools hold parts for few windows: answers equal those of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from core.types.request import Role, Sampling
from engine.config import GIB, EngineConfig
from engine.kv.layout import KVLayout
from engine.timing.pace import Pace
from router.routing.candidates import Option
from tests.e2e.conftest import Checkpoint, Lab, exact_tree
from tests.engine.spec_decode.heads.head_files import write_eagle
from tests.engine.steps import prompts
from tests.engine.tiny_models import GPT_OSS
from tests.support.disks import hang_disk
from tests.support.fake_policy import FakePolicy
from tests.support.grids import quick
from tests.support.local_cluster import LocalCluster, moved
from tests.support.long_answers import Ceiling

_GREEDY = Sampling(max_tokens=20, temperature=0.0)
_WINDOW, _BLOCK = 24, 8
# Windows are short beside contexts, so that a pool has far fewer parts than blocks.
_LONG = {"max_position_embeddings": 1024, "initializer_range": 0.3, "sliding_window": _WINDOW}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", _LONG),
    "gpt_oss": ("gpt_oss", GPT_OSS | _LONG),
}
_PROMPTS = prompts(300, 24, 25, 131, 222, 8)


def _tree(layout: KVLayout, prefill: int, decode: int, *, ranks: tuple[int, int] = (1, 1)) -> Any:
    tree = exact_tree(prefill, decode, tp=ranks)
    tree["kv"] |= {"block_size": _BLOCK}
    memory = {"kv_memory_gib": 100 * layout.block_bytes / GIB, "max_batch_tokens": 32, "max_running": 6}
    for role in Role:
        tree[role] |= memory
    return tree


def _layout(model_dir: Any) -> KVLayout:
    return EngineConfig(model_dir=model_dir, dtype="float32", block_size=_BLOCK).layout()


@pytest.fixture(params=quick(_MODELS, ["gpt_oss"]))
def model_dir(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Any:
    family, changes = _MODELS[request.param]
    return checkpoint(family, **changes)


async def _ask(cluster: LocalCluster, inputs: list[list[int]], *, num_choices: int = 1) -> list[list[list[int]]]:
    answers = await cluster.generate_all(inputs, _GREEDY, n=num_choices)
    return [[[token.token_id for token in tokens] for tokens in answer.tokens.values()] for answer in answers]


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
async def test_handoffs(ranks: tuple[int, int], model_dir: Any, lab: Lab) -> None:
    """The second time the prompts are cached, as far as their windows still are."""
    tree = _tree(_layout(model_dir), 1, 1, ranks=ranks)
    expected = lab.reference.ids(model_dir, _PROMPTS, _GREEDY)
    async with lab.own(model_dir, **tree) as cluster:
        for num_choices in (1, 2):
            found = await _ask(cluster, _PROMPTS, num_choices=num_choices)
            assert found == [[tokens] * num_choices for tokens in expected]


async def test_handoff_ships_windows_only(lab: Lab) -> None:
    """Every layer of this model has the window."""
    family, changes = _MODELS["mistral"]
    model_dir = lab.checkpoint(family, **changes)
    layout, (prompt, *_) = _layout(model_dir), _PROMPTS
    async with lab.own(model_dir, **_tree(layout, 1, 1)) as cluster:
        assert [(await cluster.generate(prompt, _GREEDY)).ids] == lab.reference.ids(model_dir, [prompt], _GREEDY)
        await cluster.until(lambda: cluster.totals(Role.PREFILL).transfers)
        assert 0 < cluster.totals(Role.PREFILL).transfer_bytes <= (_WINDOW + _BLOCK) * layout.bytes_per_token() + 4096


async def test_fetched_prefix(model_dir: Any, lab: Lab) -> None:
    """A prefill replica fetches a prefix from another one, and one from a decode replica."""
    policy, prompt = FakePolicy(), _PROMPTS[0]
    longer = prompt + _PROMPTS[3]
    policy.ways = {
        len(prompt): [Option(prefill="prefill-0", decode="decode-2")],
        len(longer): [Option(prefill="prefill-1", decode="decode-2", fetch_from="prefill-0", fetch_tokens=296)],
    }
    async with lab.own(model_dir, policy=policy, **_tree(_layout(model_dir), 2, 1)) as cluster:
        answers = [await cluster.generate(each, _GREEDY) for each in (prompt, longer)]
        assert [answer.ids for answer in answers] == lab.reference.ids(model_dir, [prompt, longer], _GREEDY)
        assert answers[1].route.fetched_tokens == 296
        next_turn = longer + answers[1].ids + [5, 6, 7]
        known = len(next_turn) // _BLOCK * _BLOCK - _BLOCK
        policy.ways[len(next_turn)] = [
            Option(prefill="prefill-0", decode="decode-2", fetch_from="decode-2", fetch_tokens=known)
        ]
        again = await cluster.generate(next_turn, _GREEDY)
        assert [again.ids] == lab.reference.ids(model_dir, [next_turn], _GREEDY)
        assert again.route.fetched_tokens + again.route.cached_tokens >= known - _BLOCK


def _small_pools(model_dir: Any, *, tier: str, ranks: int = 1, prefill: int = 1) -> Any:
    """Return a spec whose prefill replicas have room for two prompts, and for all in a lower tier."""
    layout = _layout(model_dir)
    tree = _tree(layout, prefill, 1, ranks=(ranks, 1))
    tree["prefill"] |= {"kv_memory_gib": 42 * layout.block_bytes / ranks / GIB, "max_batch_tokens": 16}
    tree["prefill"] |= {tier: 400 * layout.place_bytes / ranks / GIB}
    return tree


@pytest.mark.parametrize(
    ("tier", "ranks"), [("kv_host_gib", 1), pytest.param("kv_disk_gib", 2, marks=pytest.mark.slow)]
)
async def test_evicted_windows_return_from_lower_tiers_and_are_served_to_a_peer(
    tier: str, ranks: int, lab: Lab, tmp_path: Any
) -> None:
    family, changes = _MODELS["gpt_oss"]
    model_dir, inputs = lab.checkpoint(family, **changes), prompts(300, 301, 302, 131)
    policy = FakePolicy(here := Option(prefill="prefill-0", decode="decode-2"))
    tree = _small_pools(model_dir, tier=tier, ranks=ranks, prefill=2)
    tree["prefill"]["kv_disk_path"] = str(tmp_path)
    expected = lab.reference.ids(model_dir, inputs, _GREEDY)
    async with lab.own(model_dir, policy=policy, **tree) as cluster:
        for _ in range(2):
            answers = [await cluster.generate(tokens, _GREEDY) for tokens in inputs]
            assert [answer.ids for answer in answers] == expected
        assert [answer.route.cached_tokens for answer in answers] == [296, 296, 296, 128]
        await cluster.idle()
        status = cluster.seen(cluster.pools[Role.PREFILL][0]).status
        assert 50 < status.blocks_total < 120, "windows are freed, and not all blocks fit"
        assert status.totals.tier_losses == 0
        policy.default = [replace(here, prefill="prefill-1", fetch_from="prefill-0", fetch_tokens=296)]
        fetched = await cluster.generate(inputs[0], _GREEDY)
        assert fetched.ids == expected[0] and fetched.route.fetched_tokens == 296


@pytest.mark.slow
@pytest.mark.parametrize(("method", "ranks"), [("self", 1), ("eagle", 2)])
async def test_drafted_answers(
    method: str, ranks: int, lab: Lab, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a lower tier, which stores the layer of the draft head."""
    monkeypatch.setattr(Pace, "timing", None)  # draft always
    write_eagle(tmp_path)
    family, changes = _MODELS["gpt_oss"]
    model_dir, inputs = lab.checkpoint(family, **changes), prompts(300, 301, 302, 131)
    expected, tree = lab.reference.ids(model_dir, inputs, _GREEDY), _small_pools(model_dir, tier="kv_host_gib")
    tree["decode"] |= {"tensor_parallel": ranks}
    model = str(tmp_path) if method == "eagle" else None
    tree["speculation"] = {"method": method, "model": model, "max_tokens": 3}
    async with lab.own(model_dir, **tree) as cluster:
        for _ in range(2):
            answers = [await cluster.generate(tokens, _GREEDY) for tokens in inputs]
            assert [answer.ids for answer in answers] == expected
        await cluster.idle()
        [drafted] = cluster.seen(cluster.pools[Role.DECODE][0]).status.totals.drafted
        assert sum(drafted.tokens) > 50
        assert cluster.totals(Role.PREFILL).host_hit_tokens > 0


@pytest.mark.slow
async def test_parts_that_a_hanging_disk_may_write_are_kept_away(
    lab: Lab, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, changes = _MODELS["gpt_oss"]
    model_dir, inputs = lab.checkpoint(family, **changes), prompts(300, 301, 302, 131)
    expected, tree = lab.reference.ids(model_dir, inputs, _GREEDY), _small_pools(model_dir, tier="kv_disk_gib")
    tree["prefill"]["kv_disk_path"] = str(tmp_path)
    tree["prefill"]["kv_memory_gib"] *= 1.3  # for a prompt beside the blocks that are kept away
    async with lab.own(model_dir, timeouts={"transfer_s": 1.0}, **tree) as cluster:
        for tokens in inputs:
            await cluster.generate(tokens, _GREEDY)
        goes_on = hang_disk(monkeypatch)
        again = await cluster.generate(inputs[0], _GREEDY)
        assert ([again.ids], again.route.cached_tokens) == (expected[:1], 0)
        goes_on.set()
        await cluster.idle()
        answers = [await cluster.generate(tokens, _GREEDY) for tokens in inputs]
        assert [answer.ids for answer in answers] == expected


async def test_migrated(model_dir: Any, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    ceiling = Ceiling(12)
    ceiling.arm(monkeypatch.setattr)
    async with lab.own(model_dir, **_tree(_layout(model_dir), 1, 1)) as cluster:
        answer = await moved(cluster, cluster.generate(_PROMPTS[0], _GREEDY), ceiling)
        assert [answer.ids] == lab.reference.ids(model_dir, [_PROMPTS[0]], _GREEDY)
        again = await cluster.generate(_PROMPTS[0] + answer.ids, _GREEDY)
        assert [again.ids] == lab.reference.ids(model_dir, [_PROMPTS[0] + answer.ids], _GREEDY)


async def test_switched_roles(model_dir: Any, lab: Lab) -> None:
    expected = [[tokens] for tokens in lab.reference.ids(model_dir, _PROMPTS, _GREEDY)]
    async with lab.own(model_dir, **_tree(_layout(model_dir), 2, 2)) as cluster:
        assert await _ask(cluster, _PROMPTS) == expected
        [prefill, _], [decode, _] = cluster.pools[Role.PREFILL], cluster.pools[Role.DECODE]
        await cluster.switch(decode)
        await cluster.switch(prefill)
        assert await _ask(cluster, _PROMPTS) == expected
