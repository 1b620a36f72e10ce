"""Cluster with mutual TLS: strangers are rejected, and certificates are renewed under running requests."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from core.identity.authority import Authority
from core.identity.credentials import Identity
from core.rpc.worker_pb2 import Frame
from core.types.errors import ReplicaLost
from core.types.request import Role, Sampling
from core.wire.channel import open_channel
from router.serving.grpc_worker import GrpcWorker
from tests.core.identity.authorities import issue_authority
from tests.core.wire.every_rpc import METHODS, call, truthful
from tests.e2e.conftest import Lab, exact_tree
from tests.engine.steps import prompts
from tests.support.identities import in_clear, proven, rank, router
from tests.support.long_answers import Ceiling

_GREEDY = Sampling(max_tokens=24, temperature=0.0)
_ROUTER = router()
_TREE = exact_tree(1, 1, tp=(2, 2))  # two ranks each, so that calls within a replica are covered


async def test_certificates_are_renewed_under_running_requests(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frame streams keep their connections; later calls, transfers and migrations use new ones."""
    model_dir, [first_prompt, second_prompt] = lab.checkpoint("llama"), prompts(40, 30)
    expected = lab.reference.ids(model_dir, [first_prompt, second_prompt], _GREEDY)
    running_on = Ceiling(8)
    running_on.arm(monkeypatch.setattr)
    async with lab.own(model_dir, **_TREE) as cluster:
        running = asyncio.create_task(cluster.generate(first_prompt, _GREEDY, id="before"))
        decode = cluster.seen(cluster.pools[Role.DECODE][0])
        await cluster.until(lambda: decode.status.running == 1)
        later = []
        for turn in range(3):
            cluster.renew()
            later.append(asyncio.create_task(cluster.generate(second_prompt, _GREEDY, id=f"after {turn}")))
            await cluster.until(lambda count=turn + 2: decode.status.running == count)
        running_on.lift()
        assert (await running).ids == expected[0]
        assert [(await answer).ids for answer in later] == [expected[1]] * 3
        fresh = await cluster.add(Role.PREFILL)  # with the renewed credentials, as the others have
        assert cluster.seen(fresh).is_usable


async def test_only_without_tls_does_a_stranger_get_an_answer(lab: Lab) -> None:
    model_dir, inputs = lab.checkpoint("llama"), prompts(40)
    stop, expected = "/cluster.worker.v1.DecodeWorker/Stop", lab.reference.ids(model_dir, inputs, _GREEDY)
    async with lab.shared(model_dir, security={"tls": "off"}, **_TREE) as cluster:
        assert [(await cluster.generate(inputs[0], _GREEDY)).ids] == expected
        seen, stranger = cluster.seen(cluster.pools[Role.DECODE][0]), in_clear(router("stranger"))
        async with open_channel(seen.member.address, peer=rank(seen.id), identity=stranger) as channel:
            status = await call(channel, stop, truthful(stop, stranger.name, rank(seen.id)))
        assert status is grpc.StatusCode.OK


async def test_a_stranger_gets_nothing_from_any_rank_and_nothing_is_allocated(lab: Lab) -> None:
    theirs = Authority.create("cluster")
    async with lab.shared(lab.checkpoint("llama"), **_TREE) as cluster:
        strangers: dict[str, tuple[Identity, set[grpc.StatusCode]]] = {
            "without a certificate": (in_clear(_ROUTER), {grpc.StatusCode.UNAVAILABLE}),
            "of another deployment": (proven(theirs, _ROUTER), {grpc.StatusCode.UNAVAILABLE}),
            "expired": (proven(cluster.authority, _ROUTER, life_s=-1.0), {grpc.StatusCode.UNAVAILABLE}),
            "a rank that calls a router-only method": (
                proven(cluster.authority, rank("decode-99")),
                {
                    grpc.StatusCode.PERMISSION_DENIED,
                    grpc.StatusCode.UNIMPLEMENTED,
                },  # each role implements some of the methods
            ),
        }
        for pool in cluster.pools.values():
            for replica in pool:
                peers = [(rank(replica.id, i), one.bind()["address"]) for i, one in enumerate(replica.ranks)]
                before = replica.blocks
                for client, (identity, statuses) in strangers.items():
                    for peer, address in peers:
                        async with open_channel(address, peer=peer, identity=identity) as channel:
                            for name in _asked_by_a_router() if identity.name.is_rank else METHODS:
                                got = await call(channel, name, truthful(name, _ROUTER, peer))
                                assert got in statuses, (client, name)
                assert replica.blocks == before


async def test_a_router_speaks_to_the_replica_that_it_means_and_to_no_other_at_its_address(lab: Lab) -> None:
    """A process that changes a member's address in the index, or takes the address over, receives nothing."""
    async with lab.shared(lab.checkpoint("llama"), **_TREE) as cluster:
        there = cluster.seen(cluster.pools[Role.DECODE][0])
        for name, is_meant in ((there.id, True), ("decode-99", False)):
            worker = GrpcWorker(replace(there.member, replica=name), identity=cluster.router)
            frames: asyncio.Queue[Frame] = asyncio.Queue()
            following = asyncio.ensure_future(worker.follow(frames.put_nowait))
            if is_meant:
                assert (await asyncio.wait_for(frames.get(), 10)).status.replica == there.id
                following.cancel()
            else:
                with pytest.raises(ReplicaLost, match="decode-99: no connection"):
                    await following
            await worker.close()


async def test_an_operators_own_authority_issues_and_is_replaced_under_running_requests(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `security.tls: files`, certificates of an old and a new intermediate of one root work together."""
    model_dir, [first_prompt, second_prompt] = lab.checkpoint("llama"), prompts(40, 30)
    expected = lab.reference.ids(model_dir, [first_prompt, second_prompt], _GREEDY)
    root, security = issue_authority("root"), {"tls": "files"}
    security["ca"], _ = root.write(tmp_path, "root")
    security["certificate"], security["key"] = issue_authority("first", root).write(tmp_path, "issuing")
    running_on = Ceiling(8)
    running_on.arm(monkeypatch.setattr)
    async with lab.own(model_dir, security=security, **_TREE) as cluster:
        running = asyncio.create_task(cluster.generate(first_prompt, _GREEDY, id="before"))
        decode = cluster.seen(cluster.pools[Role.DECODE][0])
        await cluster.until(lambda: decode.status.running == 1)
        issue_authority("second", root).write(tmp_path, "issuing")
        cluster.authority = Authority.from_files(cluster.spec.security)
        fresh = await cluster.add(Role.PREFILL)
        assert cluster.seen(fresh).is_usable, "the others still show certificates of the first"
        cluster.renew()
        later = asyncio.create_task(cluster.generate(second_prompt, _GREEDY, id="after"))
        await cluster.until(lambda: decode.status.running == 2)
        running_on.lift()
        assert ((await running).ids, (await later).ids) == tuple(expected)
        theirs = proven(Authority.create(cluster.spec.name), _ROUTER)
        stop = "/cluster.worker.v1.DecodeWorker/Stop"
        for identity, status in ((cluster.router, grpc.StatusCode.OK), (theirs, grpc.StatusCode.UNAVAILABLE)):
            async with open_channel(decode.member.address, peer=rank(decode.id), identity=identity) as channel:
                assert await call(channel, stop, truthful(stop, identity.name, rank(decode.id))) is status


def _asked_by_a_router() -> list[str]:
    return [name for name in METHODS if name.rpartition("/")[2] in ("Prefill", "Generate", "Stop", "Migrate")]
