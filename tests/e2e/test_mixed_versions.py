"""Rolling upgrade: processes of the oldest supported version serve together with current ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.launch.router_admin import ask_at, seen_by
from core.identity.deployment_secrets import Purpose
from core.index.membership import Membership
from core.index.redis_client import connect_redis
from core.process.ports import free_port
from core.rpc import inference_pb2 as pb
from core.rpc import inference_pb2_grpc as rpc
from core.types.request import Role, Sampling
from core.types.wire_version import WIRE_VERSION
from router.generation import RequestRoute
from router.routing.candidates import Option
from tests.e2e.conftest import Lab, exact_tree
from tests.engine.steps import prompts
from tests.support.fake_policy import FakePolicy
from tests.support.grids import quick
from tests.support.identities import rank, router
from tests.support.local_cluster import LocalCluster
from tests.support.long_answers import Ceiling
from tests.support.oldest_version import OldestProcess, check_out
from tests.support.waiting import WITHIN_S, becomes

_GREEDY = Sampling(max_tokens=24, temperature=0.0)
_STOOD = 8  # tokens after which answers are paused until the test resumes them
_OLDEST = ("prefill-100", "decode-100")


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return check_out(tmp_path_factory.mktemp("oldest"))


@asynccontextmanager
async def _beside(cluster: LocalCluster, tree: Path, tmp_path: Path) -> AsyncIterator[dict[str, OldestProcess]]:
    """Start a prefill and a decode replica of the oldest version that join the cluster."""
    old = {
        name: OldestProcess(
            tree, cluster.launch, cluster.identity(rank(name)), log=tmp_path / f"{name}.log", ceiling=_STOOD
        )
        for name in _OLDEST
    }
    try:
        await asyncio.gather(*(asyncio.to_thread(process.start) for process in old.values()))
        await cluster.until(lambda: all((seen := cluster.replicas.get(name)) and seen.is_usable for name in old))
        yield old
    finally:
        for process in old.values():
            await asyncio.to_thread(process.stop)


@pytest.mark.timeout(180)  # two more processes start and import torch
@pytest.mark.parametrize("encrypt", quick([False, True], [True]))
async def test_workers_of_the_oldest_version_serve_beside_todays(
    lab: Lab, oldest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encrypt: bool
) -> None:
    """Old and new replicas interoperate under a current router, with unchanged tokens.

    Each prefill replica ships to each decode replica and fetches from the other, and a running choice migrates from
    the current replica to the oldest and back.
    """
    model_dir, inputs = lab.checkpoint("llama"), prompts(40, 33, 70, 21, 37, 51)
    expected = lab.reference.ids(model_dir, inputs, _GREEDY)
    policy, under = FakePolicy(), Ceiling(_STOOD)
    under.arm(monkeypatch.setattr)
    tree = exact_tree(1, 1) | {"kv": {"wire_dtype": "raw", "encrypt": encrypt}}
    async with (
        lab.own(model_dir, policy=policy, **tree) as cluster,
        _beside(cluster, oldest, tmp_path) as old,
    ):

        async def ask(number: int, **way: Any) -> RequestRoute:
            """Return the route of a short answer."""
            policy.default = [Option(**way)]
            answer = await cluster.generate(inputs[number], replace(_GREEDY, max_tokens=_STOOD), id=f"{number} {way}")
            assert answer.ids == expected[number][:_STOOD], way
            route = answer.route
            assert (route.prefill_replica, route.decode_replica, route.attempts) == (way["prefill"], way["decode"], 1)
            return route

        [today_prefill], [today] = cluster.pools[Role.PREFILL], cluster.pools[Role.DECODE]
        prefills, decodes = (today_prefill.id, _OLDEST[0]), (today.id, _OLDEST[1])
        for number, (prefill, decode) in enumerate(product(prefills, decodes)):
            assert (await ask(number, prefill=prefill, decode=decode)).blocks_shipped, "computed elsewhere"
        for number, (prefix_source, prefill) in enumerate((prefills, prefills[::-1])):
            held = {"fetch_from": prefix_source, "fetch_tokens": 16}
            number = {0: 0, 1: 2}[number]  # prompt that this source computed above
            assert (await ask(number, prefill=prefill, decode=_OLDEST[1], **held)).fetched_tokens >= 16

        first = Option(prefill=_OLDEST[0], decode=today.id)
        policy.default = [first, Option(prefill=None, decode=_OLDEST[1])]  # moving choices take the second
        moving = asyncio.create_task(cluster.generate(inputs[5], _GREEDY, id="moving"))
        await cluster.until(lambda: cluster.seen(today).status.running)
        there = cluster.replicas.get(_OLDEST[1])
        assert there
        await cluster.drain(today)
        await cluster.until(lambda: there.status.running)
        fresh = await cluster.add(Role.DECODE)
        policy.default = [first, Option(prefill=None, decode=fresh.id)]
        old[_OLDEST[1]].tell("drain")
        await cluster.until(lambda: cluster.seen(fresh).status.running and not there.status.running)
        under.lift()
        answer = await moving
        assert answer.ids == expected[5] and answer.route.decode_replica == fresh.id and answer.route.attempts == 1
        await cluster.idle()
        assert not any(process.has_ended for process in old.values())


@pytest.mark.timeout(180)
async def test_todays_workers_serve_a_router_of_the_oldest_version(lab: Lab, oldest: Path, tmp_path: Path) -> None:
    model_dir, inputs = lab.checkpoint("llama"), prompts(40, 33)
    expected = lab.reference.ids(model_dir, inputs, _GREEDY)
    tree = exact_tree(1, 1, grpc_port=free_port())
    async with lab.own(model_dir, **tree) as cluster:
        old = OldestProcess(oldest, cluster.launch, cluster.identity(router("router-old")), log=tmp_path / "router.log")
        try:
            endpoints = await asyncio.to_thread(old.start)
            await becomes(lambda: seen_by(ask_at(endpoints["admin"], "/health")) == {"prefill": 1, "decode": 1})
            async with grpc.aio.insecure_channel(endpoints["grpc"]) as channel:
                answers = [await _generate_at(channel, prompt) for prompt in inputs]
        finally:
            await asyncio.to_thread(old.stop)
        assert [ids for ids, _ in answers] == expected
        served = {replica.id for pool in cluster.pools.values() for replica in pool}
        assert {name for _, trace in answers for name in (trace.prefill_replica, trace.decode_replica)} == served
        assert (await cluster.generate(inputs[0], _GREEDY)).ids == expected[0], "today's router has them still"


def test_short_history_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.oldest_version.OLDEST", "0" * 40)
    with pytest.raises(pytest.skip.Exception, match="commit 0000000 is not in the history here"):
        check_out(tmp_path)


async def test_replica_of_another_wire_version_is_reported_and_the_others_serve(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    """The replica belongs to the deployment and its address is reachable; only its wire version differs."""
    model_dir, [inputs] = lab.checkpoint("llama"), prompts(40)
    expected = lab.reference.ids(model_dir, [inputs], _GREEDY)[0]
    async with lab.own(model_dir, **exact_tree(1, 1)) as cluster:
        [decode] = cluster.pools[Role.DECODE]
        newer = replace(cluster.seen(decode).member, replica="decode-9", wire_version=WIRE_VERSION + 1)
        async with connect_redis(lab.redis_url) as redis:
            membership = Membership(redis, name=cluster.spec.name, key=cluster.credentials.key(Purpose.MEMBERS))
            await membership.renew(newer)
            await becomes(lambda: any("'decode-9' is ignored (other version)" in line for line in caplog.messages))
            answer = await cluster.generate(inputs, _GREEDY)
            assert answer.ids == expected and answer.route.decode_replica == decode.id
            assert cluster.replicas.get("decode-9") is None


async def _generate_at(channel: grpc.aio.Channel, prompt: list[int]) -> tuple[list[int], pb.Trace]:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt), sampling=pb.SamplingParams(temperature=0, max_tokens=_GREEDY.max_tokens)
    )
    events = [event async for event in rpc.InferenceStub(channel).Generate(request, timeout=WITHIN_S)]
    return [token for event in events for token in event.delta.token_ids], events[-1].summary.trace
