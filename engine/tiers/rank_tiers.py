"""One rank's lower tiers: it copies what rank 0's table has decided."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from cluster.background import BackgroundThread
from cluster.tier import Tier
from engine.kv_pool import KVPool
from engine.tiers.orders import Loaded, LoadOrder, Source, TierOrders
from engine.tiers.store import BlockStore

logger = logging.getLogger(__name__)

_BATCH = 16  # blocks that are copied to the pool together
_CLOSE_S = 5.0


class RankTiers:
    """`carry_out` belongs to the thread that computes: what goes down is copied there and then, before its block is
    written again. What comes back does so on a thread of its own, and `on_loaded` is called on that.
    """

    def __init__(self, pool: KVPool, stores: Mapping[Tier, BlockStore], *, on_loaded: Callable[[Loaded], None]) -> None:
        self._pool = pool
        self._stores = dict(stores)
        self._on_loaded = on_loaded
        self._dropped: list[tuple[Tier, bytes]] = []
        self._orders: queue.SimpleQueue[LoadOrder | None] = queue.SimpleQueue()
        self._thread = BackgroundThread(self._load_forever, name="kv-load")
        self._thread.start()

    def carry_out(self, orders: TierOrders) -> None:
        """Blocks that are saved hold their content until this returns. Loads have only begun."""
        for spill in orders.spills:
            payload = self._stores[Tier.HOST].get(spill.source, spill.prefix_hash)
            if payload is None or not self._stores[Tier.DISK].put(spill.target, spill.prefix_hash, payload):
                self._dropped.append((Tier.DISK, spill.prefix_hash))
        if orders.saves:
            payloads_BN = self._pool.copy_out([save.block for save in orders.saves])
            for save, payload in zip(orders.saves, payloads_BN, strict=True):
                if not self._stores[save.tier].put(save.place, save.prefix_hash, payload):
                    self._dropped.append((save.tier, save.prefix_hash))
        for order in orders.loads:
            self._orders.put(order)

    def take_dropped(self) -> list[tuple[Tier, bytes]]:
        """Blocks that were to be kept and are not; each is told once. On the thread of `carry_out`."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def close(self) -> None:
        """End the loading, and let the stores finish what they have taken."""
        self._orders.put(None)
        self._thread.join(_CLOSE_S)
        for store in self._stores.values():
            store.close()

    def _load_forever(self) -> None:
        while (order := self._orders.get()) is not None:
            self._on_loaded(self._load(order))

    def _load(self, order: LoadOrder) -> Loaded:
        num_bytes: dict[Tier, int] = {}
        seconds: dict[Tier, float] = {}
        num_blocks = 0
        while batch := self._batch(order.sources[num_blocks:]):
            started = time.monotonic()
            num_loaded = self._load_batch(batch)
            tier = batch[0].tier
            seconds[tier] = seconds.get(tier, 0.0) + time.monotonic() - started
            num_bytes[tier] = num_bytes.get(tier, 0) + num_loaded * self._pool.layout.block_bytes
            num_blocks += num_loaded
            if num_loaded < len(batch):
                break
        return Loaded(order.id, num_blocks, num_bytes, seconds)

    def _batch(self, sources: list[Source]) -> list[Source]:
        """The leading ones of one tier, up to _BATCH."""
        batch: list[Source] = []
        for source in sources[:_BATCH]:
            if source.tier is not sources[0].tier:
                break
            batch.append(source)
        return batch

    def _load_batch(self, batch: list[Source]) -> int:
        """How many of them are in the pool now."""
        payloads: list[Tensor] = []
        for source in batch:
            payload = self._stores[source.tier].get(source.place, source.prefix_hash)
            if payload is None:
                break
            payloads.append(payload)
        if payloads:
            self._pool.copy_in(torch.stack(payloads), [source.block for source in batch[: len(payloads)]])
            self._pool.synchronize()
        return len(payloads)
