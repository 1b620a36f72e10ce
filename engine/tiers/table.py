"""Table of a replica's blocks by tier, and rank 0's decisions on what to move. Touches no payload bytes.

    device ──evicted──> host ──evicted──> disk ──evicted──> gone
      ^                  │                 │
      └──────load────────┴─────────────────┘     a copy stays below

Blocks evicted from a tier move to the next one. A block that is always in use is never evicted and would be lost with
the process, along with every block that depends on it. Therefore `save_ahead` copies blocks to disk while idle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from core.types.tier import Tier
from engine.kv.block_manager import BlockManager
from engine.tiers.commands import LoadOrder, LoadResult, LoadSource, Save, Spill, TierOrders
from engine.timing.rate import Rate

T = TypeVar("T")

# Loads skipped as too slow before one is measured again.
_TRY_AGAIN = 16


@dataclass(eq=False)
class Load(Generic[T]):
    """Load of blocks to the device, in flight, for `owner`."""

    owner: T
    order: LoadOrder
    # On the caller's clock.
    expires_at: float
    is_given_up: bool = False
    # By rank.
    answers: dict[int, LoadResult] = field(default_factory=dict)

    @property
    def blocks(self) -> list[int]:
        return [source.block for source in self.order.sources]

    @property
    def num_loaded(self) -> int:
        """Number of leading blocks that every rank has loaded."""
        return min(answer.num_blocks for answer in self.answers.values())


class TierTable(Generic[T]):
    """Tier index of one replica. Owned by the step thread of rank 0.

    `lower` maps each tier below the device to the manager of its places.
    """

    def __init__(
        self, device: BlockManager, lower: Mapping[Tier, BlockManager], *, num_ranks: int, block_bytes: int
    ) -> None:
        """block_bytes: bytes of a block on one rank."""
        # Blocks loaded, by tier.
        self.num_hits = dict.fromkeys(lower, 0)
        # Blocks saved, by tier.
        self.num_saved = dict.fromkeys(lower, 0)
        self._device = device
        self._lower = dict(sorted(lower.items()))
        self._num_ranks = num_ranks
        self._block_bytes = block_bytes
        # Bytes per second.
        self._rates = {tier: Rate() for tier in lower}
        self._num_passed_over = 0
        self._loads: dict[int, Load[T]] = {}
        self._ids = itertools.count()
        # Evicted from the device since the last orders.
        self._evicted: list[tuple[int, bytes]] = []
        self._orders = TierOrders()
        # Blocks on the device that the disk tier does not have, the oldest first.
        self._unsaved: dict[bytes, None] = {}
        if self._lower:
            device.on_evict = lambda block, prefix_hash: self._evicted.append((block, prefix_hash))
        for tier, below in itertools.pairwise(self._lower):
            self._lower[tier].on_evict = self._spiller(below)

    def take_orders(self) -> list[TierOrders]:
        """Return the orders for every rank. Execute them before writing to blocks allocated since the last call."""
        evicted, self._evicted = self._evicted, []
        done: list[TierOrders] = []
        for block, prefix_hash in evicted:
            self._save(block, prefix_hash, done)
        orders, self._orders = self._orders, TierOrders()
        return [*done, orders] if orders else done

    def save_ahead(self, max_blocks: int) -> None:
        """Order copies to disk of the oldest blocks that are only on the device."""
        disk = self._lower.get(Tier.DISK)
        for prefix_hash in list(itertools.islice(self._unsaved, max_blocks)):
            del self._unsaved[prefix_hash]
            if disk is None or prefix_hash in disk or prefix_hash not in self._device:
                continue
            if (place := _take(disk, prefix_hash)) is None:
                return
            self._orders.saves.append(Save(Tier.DISK, self._device.block_of(prefix_hash), place, prefix_hash))
            self.num_saved[Tier.DISK] += 1

    @property
    def has_unsaved(self) -> bool:
        return bool(self._unsaved)

    # Loading to the device.

    def offer(self, hashes: Sequence[bytes], *, compute_block_s: float) -> int:
        """Count the leading blocks that are on the device or load faster than they compute; 0 if none needs loading.

        compute_block_s: seconds to compute a block; 0 if unknown, which favours loading.
        """
        if not self._lower:
            return 0
        start = self._device.match(hashes)
        tiers = [tier for tier, _ in self._find(hashes[start:])]
        if not tiers:
            return 0
        num_worth = worth_loading(tiers, {tier: self.block_s(tier) for tier in self._lower}, compute_block_s)
        self._num_passed_over = 0 if num_worth else self._num_passed_over + 1
        if self._num_passed_over > _TRY_AGAIN:
            self._num_passed_over, num_worth = 0, len(tiers)
        return start + num_worth if num_worth else 0

    def depth(self, hashes: Sequence[bytes]) -> int:
        """Count the leading blocks that are present in any tier."""
        start = self._device.match(hashes)
        return start + len(self._find(hashes[start:]))

    def begin(self, owner: T, hashes: Sequence[bytes], blocks: Sequence[int], *, expires_at: float) -> Load[T] | None:
        """Load the leading blocks that are present into the owner's blocks. Returns None if there are none."""
        sources = []
        for (tier, manager), prefix_hash, block in zip(self._find(hashes), hashes, blocks, strict=False):
            taken = manager.allocate([prefix_hash], 1)
            assert taken
            sources.append(LoadSource(tier, taken[0][0], prefix_hash, block))
        if not sources:
            return None
        order = LoadOrder(next(self._ids), sources)
        load = self._loads[order.id] = Load(owner, order, expires_at)
        self._orders.loads.append(order)
        return load

    def loaded(self, rank: int, loaded: LoadResult) -> Load[T] | None:
        """Record one rank's result. Returns the load once all ranks have reported, unless it was given up."""
        load = self._loads.get(loaded.id)
        if load is None:
            return None
        load.answers[rank] = loaded
        if len(load.answers) < self._num_ranks:
            return None
        del self._loads[loaded.id]
        self._let_go(load)
        if load.is_given_up:
            self._device.release(load.blocks)
            return None
        return load

    def give_up(self, load: Load[T]) -> None:
        """Abandon a load. Takes over the owner's reference to the blocks that it fills."""
        load.is_given_up = True
        self._device.quarantine(load.blocks)

    def expired(self, now: float) -> list[Load[T]]:
        """Return the loads past their deadline; the caller gives them up."""
        return [load for load in self._loads.values() if load.expires_at < now and not load.is_given_up]

    # Changes reported by the lower tiers.

    def found(self, places: Mapping[int, bytes]) -> None:
        """Register disk blocks of an earlier process, the oldest first."""
        self._lower[Tier.DISK].adopt(places)

    def lost(self, tier: Tier, prefix_hash: bytes) -> None:
        """Drop a block that the tier failed to store."""
        self._lower[tier].discard(prefix_hash)

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Remove these hashes from all lower tiers."""
        for manager in self._lower.values():
            for prefix_hash in hashes:
                manager.unfill(prefix_hash)

    # Metrics and reports.

    def num_blocks(self, tier: Tier) -> int:
        return self._lower[tier].num_full if tier in self._lower else 0

    def bytes_per_s(self, tier: Tier) -> float:
        """Return the load bandwidth of all ranks from this tier to the device; 0 until measured."""
        return self._rates[tier].per_s * self._num_ranks if tier in self._rates else 0.0

    def block_s(self, tier: Tier) -> float:
        """Return the seconds to load a block; 0 until measured."""
        rate = self._rates[tier].per_s
        return self._block_bytes / rate if rate else 0.0

    def take_changes(self) -> dict[bytes, Tier | None]:
        """Return the hashes that may have moved since the last call, with the best tier that holds each."""
        changed: set[bytes] = set()
        for manager in (self._device, *self._lower.values()):
            changed.update(manager.take_changes())
        if disk := self._lower.get(Tier.DISK):
            for prefix_hash in changed:
                if prefix_hash not in self._device or prefix_hash in disk:
                    self._unsaved.pop(prefix_hash, None)
                else:
                    self._unsaved.setdefault(prefix_hash)
        return {prefix_hash: self._tier_of(prefix_hash) for prefix_hash in changed}

    def held(self) -> dict[bytes, Tier]:
        """Return every block present, with the best tier that holds it."""
        held: dict[bytes, Tier] = {}
        for tier, manager in reversed(self._lower.items()):
            held.update(dict.fromkeys(manager.full_hashes(), tier))
        return held | dict.fromkeys(self._device.full_hashes(), Tier.DEVICE)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block and every place is in one state, and only loads hold places."""
        self._device.check_integrity()
        for tier, manager in self._lower.items():
            manager.check_integrity()
            sources = [source for load in self._loads.values() for source in load.order.sources]
            held = {source.place for source in sources if source.tier is tier}
            assert manager.num_blocks - manager.num_available == len(held), f"{tier.name}: places held without a load"

    def _find(self, hashes: Sequence[bytes]) -> list[tuple[Tier, BlockManager]]:
        """Return the tier of each leading block present, up to the first that is missing."""
        found = []
        for prefix_hash in hashes:
            place = next(((t, manager) for t, manager in self._lower.items() if prefix_hash in manager), None)
            if place is None:
                break
            found.append(place)
        return found

    def _tier_of(self, prefix_hash: bytes) -> Tier | None:
        if prefix_hash in self._device:
            return Tier.DEVICE
        return next((tier for tier, manager in self._lower.items() if prefix_hash in manager), None)

    def _save(self, block: int, prefix_hash: bytes, done: list[TierOrders]) -> None:
        """Order a copy of a block to the next tier. Orders that must be executed first are appended to `done`."""
        tier, manager = next(iter(self._lower.items()))
        orders = self._orders
        num_spills = len(orders.spills)
        if prefix_hash in manager or (place := _take(manager, prefix_hash)) is None:
            return
        if len(orders.spills) > num_spills and any(save.place == place for save in orders.saves):
            # The spilled place was filled by a save in the same orders: split them so that the save runs first.
            done.append(TierOrders(orders.spills[:-1], orders.saves))
            orders.spills, orders.saves = orders.spills[-1:], []
        orders.saves.append(Save(tier, block, place, prefix_hash))
        self.num_saved[tier] += 1

    def _spiller(self, below: Tier) -> Callable[[int, bytes], None]:
        def spill(place: int, prefix_hash: bytes) -> None:
            manager = self._lower[below]
            if prefix_hash in manager:
                return
            if (target := _take(manager, prefix_hash)) is not None:
                self.num_saved[below] += 1
                self._orders.spills.append(Spill(place, target, prefix_hash))

        return spill

    def _let_go(self, load: Load[T]) -> None:
        """Update the bandwidth from a finished load and release its places."""
        for tier in {source.tier for source in load.order.sources}:
            slowest = max(load.answers.values(), key=lambda answer: answer.seconds.get(tier, 0.0))
            if seconds := slowest.seconds.get(tier, 0.0):
                self._rates[tier].add(slowest.num_bytes[tier], seconds)
        for i, source in enumerate(load.order.sources):
            manager = self._lower[source.tier]
            manager.free([source.place])
            self.num_hits[source.tier] += i < load.num_loaded
            if i == load.num_loaded:
                manager.discard(source.prefix_hash)


def worth_loading(tiers: Sequence[Tier], load_s: Mapping[Tier, float], compute_s: float) -> int:
    """Return the number of leading blocks to load that minimizes the time until all are present. Pure.

    load_s: seconds per block by tier, 0 if unknown; compute_s: seconds to compute a block.
    """
    if not compute_s:
        return len(tiers)
    best, best_s, saved_s = 0, 0.0, 0.0
    for count, tier in enumerate(tiers, 1):
        saved_s += compute_s - load_s[tier]
        if saved_s > best_s:
            best, best_s = count, saved_s
    return best


def _take(manager: BlockManager, prefix_hash: bytes) -> int | None:
    """Allocate a place for this block. Returns None if loads hold them all."""
    taken = manager.allocate([], 1)
    if taken is None:
        return None
    [place], _ = taken
    manager.fill_block(place, prefix_hash)
    manager.free([place])
    return place
