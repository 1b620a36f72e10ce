"""Clusters that the tests of this process share, by their settings: a start takes longer than most tests.

async with lab.shared(model_dir, **exact_tree(1, 1)) as cluster:    # `lab` is a fixture of tests/e2e/conftest.py
    ...

Ranks stay from test to test; each test gets its own router, and finds every replica without cached blocks. What else
ranks remember stays: their counters (see `LocalCluster.totals`), answers to draft from, and measured step times, so
that a test whose routes matter sets the policy. A test that adds, removes, switches, drains or kills a replica starts
its own cluster (`local_cluster`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import redis

from core.spec.schema import Spec
from router.routing.candidates import Policy
from tests.support.local_cluster import SETTLE_S, LocalCluster, make_cluster, parse_tree
from tests.support.waiting import becomes

_MAX_LIVE = 3


class SharedClusters:
    """Clusters by their settings, from the least to the most recently used. Used by one test at a time.

    A cluster is in `_idle` only while no test uses it, and returns only from a test that passed and left it whole.
    """

    def __init__(self, redis_url: str, *, settle_s: float = SETTLE_S) -> None:
        """redis_url: server with a database for each cluster, beside database 0. settle_s: see LocalCluster."""
        self._settle_s = settle_s
        self._idle: OrderedDict[tuple[str, bool], LocalCluster] = OrderedDict()
        self._urls = [f"{redis_url}?db={number}" for number in range(1, _MAX_LIVE + 1)]

    @asynccontextmanager
    async def __call__(
        self, model_dir: Path, *, policy: Policy | None = None, processes: bool = False, **tree: Any
    ) -> AsyncIterator[LocalCluster]:
        """Use the cluster of this spec, and start it unless it runs. The router's section may differ from test to test.

        Asserts at the end that every request has ended and that all ranks have their blocks.
        """
        spec = parse_tree(model_dir, tree)
        key = spec.model_dump_json(exclude={"router"}), processes
        cluster = self._idle.pop(key, None) or await self._make(spec, processes)
        cluster.launch = replace(cluster.launch, spec=spec)
        is_whole = False
        try:
            await _forgotten(cluster)
            async with cluster.routed(policy, clear=True):
                await (cluster.until_known() if cluster.every_replica else cluster.start())
                yield cluster
            is_whole = True
        finally:
            if is_whole:
                self._idle[key] = cluster
            else:
                await asyncio.to_thread(self._stop, cluster)

    async def _make(self, spec: Spec, processes: bool) -> LocalCluster:
        if not self._urls:
            await asyncio.to_thread(self._stop_oldest)
        return make_cluster(spec, self._urls.pop(), processes=processes, settle_s=self._settle_s)

    def close(self) -> None:
        while self._idle:
            self._stop_oldest()

    def _stop_oldest(self) -> None:
        _, cluster = self._idle.popitem(last=False)
        self._stop(cluster)

    def _stop(self, cluster: LocalCluster) -> None:
        cluster.stop()
        self._urls.append(cluster.credentials.index_url)


async def _forgotten(cluster: LocalCluster) -> None:
    """Wait until Redis lists no block that an earlier test has left."""
    with redis.Redis.from_url(cluster.credentials.index_url) as client:
        await becomes(lambda: not client.keys(f"{cluster.spec.name}:blocks:*"))
