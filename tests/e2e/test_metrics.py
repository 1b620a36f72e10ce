"""Metrics of a deployment: a router lists all routers and workers, and each exports itself alone."""

from __future__ import annotations

import asyncio
import signal

from core.types.request import Role, Sampling
from tests.e2e.conftest import Lab
from tests.support.router_service import router_service
from tests.support.scraping import scrape, targets_of
from tests.support.waiting import told


async def test_workers_are_scraped_until_they_die(lab: Lab) -> None:
    pool = {"kv_memory_gib": 0.01}
    tree = {
        "model": {"served_name": "tiny", "dtype": "float32"},
        "prefill": pool,
        "decode": pool,
        "router": {"max_local_prefill": 0},
    }
    async with (
        lab.own(lab.checkpoint("llama"), processes=True, **tree) as cluster,
        router_service(cluster) as service,
    ):
        admin = "{}:{}".format(*service.admin_address)

        async def listed() -> dict[str, str]:
            targets = await asyncio.to_thread(targets_of, admin)
            assert all(one.labels["deployment"] == "cluster" and one.labels["model"] == "tiny" for one in targets)
            return {one.labels.get("replica", one.labels["role"]): one.address for one in targets}

        async def all_are_listed() -> bool:
            return (await listed()).keys() == {"router", "prefill-0", "decode-1"}

        await told(all_are_listed)
        addresses = await listed()
        assert addresses["router"] == admin
        await cluster.generate(range(5, 60), Sampling(max_tokens=4, temperature=0.0))
        await cluster.idle()

        samples = await asyncio.to_thread(lambda: list(scrape(addresses["decode-1"])))
        labels = {"deployment": "cluster", "model": "tiny", "replica": "decode-1", "role": "decode"}
        assert all(sample.labels.items() >= labels.items() for sample in samples)

        async def has_counted() -> bool:
            samples = await asyncio.to_thread(lambda: list(scrape(addresses["prefill-0"])))
            return {sample.name: sample.value for sample in samples}["xpyd_kv_transfer_bytes_total"] > 0

        await told(has_counted)
        samples = await asyncio.to_thread(lambda: list(scrape(admin)))
        assert not [sample for sample in samples if "replica" in sample.labels]

        await asyncio.to_thread(cluster.pools[Role.DECODE][0].send, signal.SIGKILL)

        async def has_left() -> bool:
            return (await listed()).keys() == {"router", "prefill-0"}

        await told(has_left)
