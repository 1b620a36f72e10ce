"""Lower tiers of one rank: executes the copies that rank 0's table decides.

Copies of whole blocks between the pool and host memory overlap with compute:

    save   pool ──gather, on the compute stream──> staging ──down stream──> host row
    load   host row ──up stream──> staging ──up stream──> pool

A gather takes microseconds and the bus transfer takes as long as a step. A block may be overwritten right after its
gather, and no step waits for the bus unless saves exceed its bandwidth.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle

import torch
from torch import Tensor

from core.process.background import BackgroundThread
from core.types.tier import Tier
from engine.kv.pool import KVPool
from engine.runner import streams
from engine.runner.streams import Event
from engine.tiers.commands import LoadOrder, LoadResult, LoadSource, Save, TierOrders
from engine.tiers.disk_store import DiskStore
from engine.tiers.host_store import BlockStore, HostStore

logger = logging.getLogger(__name__)

# Blocks per copy.
BATCH = 16
_CLOSE_S = 5.0
_MAX_DROPPED = 10_000


class RankTiers:
    """Block copies of one rank. The compute thread calls `carry_out`.

    Saves are copied before their block is overwritten; from a GPU to host memory without waiting. A loader thread
    executes loads and calls `on_loaded`.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        host: HostStore | None,
        disk: DiskStore | None,
        on_loaded: Callable[[LoadResult], None],
    ) -> None:
        self._pool = pool
        self._copies = BlockCopies(pool)
        self._host = host
        self._disk = disk
        stores = {Tier.HOST: host, Tier.DISK: disk}
        self._stores: dict[Tier, BlockStore] = {tier: store for tier, store in stores.items() if store}
        self.on_loaded = on_loaded
        # Blocks that this rank failed to save. Bounded, because only rank 0 drains it.
        self._dropped: deque[tuple[Tier, bytes]] = deque(maxlen=_MAX_DROPPED)
        # Each load with the event at which the previous use of its blocks ends.
        self._orders: queue.SimpleQueue[tuple[LoadOrder, Event] | None] = queue.SimpleQueue()
        self._thread = BackgroundThread(self._load_forever, name="kv-load")
        self._thread.start()

    @property
    def num_places(self) -> dict[Tier, int]:
        return {tier: store.num_places for tier, store in self._stores.items()}

    def carry_out(self, orders: TierOrders) -> None:
        """Spill and save. The caller must keep saved blocks intact until this returns.

        On a GPU, they must stay intact until the work queued at its return is done.
        """
        for spill in orders.spills:
            payload = self._stores[Tier.HOST].get(spill.source, spill.prefix_hash)
            if payload is None or not self._stores[Tier.DISK].put(spill.target, spill.prefix_hash, payload):
                self._dropped.append((Tier.DISK, spill.prefix_hash))
        self._save_to_host([save for save in orders.saves if save.tier is Tier.HOST])
        self._save_to_disk([save for save in orders.saves if save.tier is Tier.DISK])

    def start_loads(self, orders: TierOrders) -> None:
        """Start the loads, after the work queued so far."""
        copies = [pair for order in orders.loads for pair in order.copies]
        for i in range(0, len(copies), BATCH):
            sources, targets = zip(*copies[i : i + BATCH], strict=True)
            self._pool.copy_in(self._pool.copy_out(sources), targets)
        if orders.loads:
            behind = streams.streams_of(self._pool.device).mark()
            for order in orders.loads:
                self._orders.put((order, behind))

    def _save_to_host(self, saves: list[Save]) -> None:
        for batch in (saves[i : i + BATCH] for i in range(0, len(saves), BATCH)):
            assert self._host, "save to the host tier, which this rank does not have"
            when = self._copies.save([save.block for save in batch], [self._host.row(save.place) for save in batch])
            for save in batch:
                self._host.is_saved(save.place, save.prefix_hash, when)

    def _save_to_disk(self, saves: list[Save]) -> None:
        """Save to disk. On a GPU this waits for queued compute; orders are mostly given while the device is idle."""
        if saves:
            payloads_BN = self._pool.copy_out([save.block for save in saves])
            for save, payload in zip(saves, payloads_BN, strict=True):
                if not self._stores[save.tier].put(save.place, save.prefix_hash, payload):
                    self._dropped.append((save.tier, save.prefix_hash))

    def take_lost(self) -> list[tuple[Tier, bytes]]:
        """Return blocks that could not be saved, and clear the list. Call on the thread of `carry_out`."""
        lost = list(self._dropped)
        self._dropped.clear()
        return lost + [(Tier.DISK, prefix_hash) for _, prefix_hash in self._disk.take_lost()] if self._disk else lost

    def take_found(self) -> dict[int, bytes]:
        """Return the disk's blocks of an earlier process; see DiskStore."""
        return self._disk.take_found() if self._disk else {}

    @property
    def room_ahead(self) -> int:
        """Number of blocks that may be copied to disk ahead of eviction without crowding out required saves."""
        return self._disk.num_free_in_queue // 2 if self._disk else 0

    def close(self) -> None:
        """Stop loading, and let the stores finish accepted blocks."""
        self._orders.put(None)
        self._thread.join(_CLOSE_S)
        for store in self._stores.values():
            store.close()

    def _load_forever(self) -> None:
        while (ordered := self._orders.get()) is not None:
            self.on_loaded(self._load_or_none(*ordered))

    def _load_or_none(self, order: LoadOrder, behind: Event) -> LoadResult:
        try:
            return self._load(order, behind)
        except Exception:  # keep the loader alive; the owner of the load must get a result
            logger.exception("load %s failed", order.id)
            return LoadResult(order.id, 0, {}, {})

    def _load(self, order: LoadOrder, behind: Event) -> LoadResult:
        num_bytes: dict[Tier, int] = {}
        seconds: dict[Tier, float] = {}
        num_blocks = 0
        while batch := self._batch(order.sources[num_blocks:]):
            started = time.monotonic()
            num_loaded = self._load_batch(batch, behind)
            tier = batch[0].tier
            seconds[tier] = seconds.get(tier, 0.0) + time.monotonic() - started
            num_bytes[tier] = num_bytes.get(tier, 0) + num_loaded * self._pool.layout.place_bytes
            num_blocks += num_loaded
            if num_loaded < len(batch):
                break
        return LoadResult(order.id, num_blocks, num_bytes, seconds)

    def _batch(self, sources: list[LoadSource]) -> list[LoadSource]:
        """Return the leading sources of one tier, up to BATCH."""
        batch: list[LoadSource] = []
        for source in sources[:BATCH]:
            if source.tier is not sources[0].tier:
                break
            batch.append(source)
        return batch

    def _load_batch(self, batch: list[LoadSource], behind: Event) -> int:
        """Load the leading blocks that are present. Returns their number."""
        payloads: list[Tensor] = []
        for source in batch:
            payload = self._stores[source.tier].get(source.place, source.prefix_hash)
            if payload is None:
                break
            payloads.append(payload)
        if payloads:
            self._copies.load(payloads, [source.block for source in batch[: len(payloads)]], behind=behind)
        return len(payloads)


class BlockCopies:
    """Block copies of one rank. The compute thread calls `save`, the loader thread calls `load`."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._streams = streams.streams_of(pool.device)
        self._down, self._up = self._streams.device_stream(), self._streams.device_stream()
        self._going_down = cycle([_Staging(pool), _Staging(pool)])
        self._going_up = _Staging(pool)

    def save(self, blocks: Sequence[int], rows: Sequence[Tensor]) -> Event:
        """Copy up to BATCH blocks to host rows, each (place_bytes,) uint8.

        Work that the caller starts afterwards may overwrite the blocks. The rows are valid once the event completes.
        """
        staging = next(self._going_down)
        staging.emptied.hold_up()
        staged_BN = staging.rows_BN[: len(blocks)]
        self._pool.copy_out(blocks, into=staged_BN)
        gathered = self._streams.mark()
        with self._down.entered():
            gathered.hold_up()
            for row, staged in zip(rows, staged_BN, strict=True):
                self._streams.copy(row, staged)
            staging.emptied = self._streams.mark()
        return staging.emptied

    def load(self, rows: Sequence[Tensor], blocks: Sequence[int], *, behind: Event) -> None:
        """Copy up to BATCH rows to blocks after the event `behind`; returns when the copy is complete."""
        staged_BN = self._going_up.rows_BN[: len(rows)]
        with self._up.entered():
            for row, staged in zip(rows, staged_BN, strict=True):
                self._streams.copy(staged, row)
            behind.hold_up()
            self._pool.copy_in(staged_BN, blocks)
            loaded = self._streams.mark()
        loaded.wait()


class _Staging:
    """Device buffer of one batch."""

    def __init__(self, pool: KVPool) -> None:
        self.rows_BN = torch.empty((BATCH, pool.layout.place_bytes), dtype=torch.uint8, device=pool.device)
        # Completes when the buffer may be filled again.
        self.emptied = streams.streams_of(pool.device).mark()
