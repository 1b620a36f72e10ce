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
from typing import Generic, TypeVar

from core.types.prefix_hash import checkpoint_hash
from core.types.tier import Tier
from engine.kv.block_allocator import BlockAllocator
from engine.kv.block_manager import BlockManager
from engine.tiers.commands import Load, LoadOrder, LoadResult, LoadSource, Save, Spill, TierOrders, worth_loading
from engine.tiers.sources import Sources
from engine.timing.rate import Rate

T = TypeVar("T")

# Loads skipped as too slow before one is measured again.
_TRY_AGAIN = 16


class TierTable(Generic[T]):
    """Tier index of one replica. Owned by the step thread of rank 0.

    `lower` maps each tier below the device to the allocator of its places. The allocator finds blocks and pieces of
    checkpoints (see BlockManager) by their hashes.
    """

    def __init__(
        self,
        device: BlockManager,
        lower: Mapping[Tier, BlockAllocator],
        *,
        num_ranks: int,
        place_bytes: int,
        num_pieces: int = 0,
    ) -> None:
        """place_bytes, num_pieces: see KVLayout."""
        # Blocks loaded, by tier.
        self.num_hits = dict.fromkeys(lower, 0)
        # Blocks saved, by tier.
        self.num_saved = dict.fromkeys(lower, 0)
        self._device = device
        self._lower = dict(sorted(lower.items()))
        self._num_ranks = num_ranks
        self._place_bytes = place_bytes
        # Of a checkpoint; 0: the model has none.
        self._num_pieces = num_pieces
        # Bytes per second.
        self._rates = {tier: Rate() for tier in lower}
        self._num_passed_over = 0
        self._sources = Sources(device, self._lower, num_pieces=num_pieces)
        self._loads: dict[int, Load[T]] = {}
        self._ids = itertools.count()
        # Evicted from the device since the last orders.
        self._evicted: list[tuple[int, bytes]] = []
        self._orders = TierOrders()
        # Blocks and pieces on the device that the disk tier does not have, the oldest first. Values: None for a block;
        # the hash of its block and its number for a piece.
        self._unsaved: dict[bytes, tuple[bytes, int] | None] = {}
        # Hashes of the first pieces of the checkpoints on the device.
        self._first_pieces: set[bytes] = set()
        if self._lower:
            device.on_evict = lambda block, prefix_hash: self._evicted.append((block, prefix_hash))
            if device.states:
                device.states.on_evict = self._evicted_checkpoint
            if device.windows:
                device.windows.on_evict = self._evicted_checkpoint
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
        """Order copies to disk of the oldest blocks and pieces that are only on the device.

        A copy of a piece gathers its whole part, so all pieces of a part are saved together, even beyond `max_blocks`.
        """
        disk, num_more = self._lower.get(Tier.DISK), self._num_pieces - 1 if self._device.windows else 0
        for i, (prefix_hash, piece) in enumerate(list(itertools.islice(self._unsaved.items(), max_blocks + num_more))):
            if i >= max_blocks and not (piece and piece[1]):
                break
            del self._unsaved[prefix_hash]
            if disk is None or prefix_hash in disk or (source := self._source(prefix_hash, piece)) is None:
                continue
            if (place := _take(disk, prefix_hash)) is None:
                return
            self._orders.saves.append(Save(Tier.DISK, source, place, prefix_hash))
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
        if self._device.states or self._device.windows:
            return self._offer_to_checkpoint(hashes, compute_block_s=compute_block_s)
        num_here = self._device.match(hashes)
        tiers = [tier for tier, _ in self._sources.find(hashes[num_here:])]
        if not tiers:
            return 0
        num_worth = worth_loading(tiers, {tier: self.block_s(tier) for tier in self._lower}, compute_block_s)
        if self._is_tried(is_worth=num_worth > 0):
            return num_here + (num_worth or len(tiers))
        return 0

    def _offer_to_checkpoint(self, hashes: Sequence[bytes], *, compute_block_s: float) -> int:
        """Like `offer`, for models with checkpoints: the longest usable prefix is loaded whole or not at all."""
        depth, needed = (
            self._sources.with_parts(self._device.windows, hashes)
            if self._device.windows
            else self._sources.with_state(hashes)
        )
        num_computed = self._device.match_reusable(hashes)
        if depth <= num_computed:
            return 0
        compute_s = (depth - num_computed) * compute_block_s
        is_worth = sum(map(self.block_s, needed)) < compute_s or not compute_s
        return depth if self._is_tried(is_worth=is_worth) else 0

    def _is_tried(self, *, is_worth: bool) -> bool:
        """Return True if loading pays, and once after every _TRY_AGAIN loads that do not."""
        is_tried = is_worth or self._num_passed_over >= _TRY_AGAIN
        self._num_passed_over = 0 if is_tried else self._num_passed_over + 1
        return is_tried

    def depth(self, hashes: Sequence[bytes]) -> int:
        """Count the leading blocks that are present in any tier."""
        if self._device.windows:
            return self._sources.num_present(hashes)
        start = self._device.match(hashes)
        return start + len(self._sources.find(hashes[start:]))

    def begin(
        self,
        owner: T,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        *,
        expires_at: float,
        state: tuple[bytes, int] | None = None,
    ) -> Load[T] | None:
        """Load the leading blocks that are present into the owner's blocks. Returns None if there are none.

        state: hash of a block with a checkpoint, and the slot to load its state to. With a state or with windows,
        returns None unless all blocks and the checkpoints needed to continue behind them are present.

        With windows, the owner's blocks that the device has under their hashes need no load. Others are loaded, or
        copied on the device; those that the next query sees need parts, which are loaded, too.
        """
        plan = self._sources.plan(hashes, blocks, state)
        if not plan or not (plan.blocks or plan.pieces):
            return None
        if state and self._device.states and not plan.pieces:
            self._device.states.copy_to(state[1], state[0])
        sources = []
        for tier, manager, prefix_hash, block in plan.blocks + plan.pieces:
            taken = manager.allocate([prefix_hash], 1)
            assert taken
            sources.append(LoadSource(tier, taken[0][0], prefix_hash, block))
        order = LoadOrder(next(self._ids), sources, plan.copies)
        filled = [target.block for target in plan.blocks] + [block for _, block in plan.copies]
        load = self._loads[order.id] = Load(
            owner,
            order,
            expires_at,
            filled + ([state[1]] if state else []),
            num_block_sources=len(plan.blocks),
            num_blocks=len(hashes),
            is_whole=state is not None or self._device.windows is not None,
        )
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

    def has_late(self, now: float) -> bool:
        """Return True if a load is in flight past its deadline, given up or not."""
        return any(load.expires_at < now for load in self._loads.values())

    # Changes reported by the lower tiers.

    def found(self, places: Mapping[int, bytes]) -> None:
        """Register disk blocks of an earlier process, the oldest first."""
        self._lower[Tier.DISK].adopt(places)

    def lost(self, tier: Tier, prefix_hash: bytes) -> None:
        """Drop a block that the tier failed to store."""
        self._lower[tier].discard(prefix_hash)

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Remove these hashes from all lower tiers."""
        if not self._lower:
            return
        pieces = [checkpoint_hash(one, piece=i) for one in hashes for i in range(self._num_pieces)]
        for manager in self._lower.values():
            for prefix_hash in (*hashes, *pieces):
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
        return self._place_bytes / rate if rate else 0.0

    def take_changes(self) -> dict[bytes, Tier | None]:
        """Return the hashes that may have moved since the last call, with the best tier that holds each.

        A checkpoint on the device is listed by its first piece, one in a lower tier by every piece.
        """
        changed: set[bytes] = set()
        for manager in (self._device, *self._lower.values()):
            changed.update(manager.take_changes())
        if disk := self._lower.get(Tier.DISK):
            for prefix_hash in changed:
                if prefix_hash not in self._device or prefix_hash in disk:
                    self._unsaved.pop(prefix_hash, None)
                else:
                    self._unsaved.setdefault(prefix_hash)
        changed.update(self._changed_checkpoints(self._device.take_checkpoint_changes()))
        return {prefix_hash: self._tier_of(prefix_hash) for prefix_hash in changed}

    def _changed_checkpoints(self, changes: Mapping[bytes, bool]) -> list[bytes]:
        """Record checkpoints made and dropped on the device. Returns the hashes of their first pieces."""
        first_pieces = []
        for block_hash, is_kept in changes.items():
            first_pieces.append(checkpoint_hash(block_hash))
            if is_kept:
                self._first_pieces.add(first_pieces[-1])
            else:
                self._first_pieces.discard(first_pieces[-1])
            for i in range(self._num_pieces if self._has_room(Tier.DISK) else 0):
                prefix_hash = checkpoint_hash(block_hash, piece=i)
                if is_kept and prefix_hash not in self._lower[Tier.DISK]:
                    self._unsaved.setdefault(prefix_hash, (block_hash, i))
                else:
                    self._unsaved.pop(prefix_hash, None)
        return first_pieces

    def held(self) -> dict[bytes, Tier]:
        """Return every block present, with the best tier that holds it."""
        held: dict[bytes, Tier] = {}
        for tier, manager in reversed(self._lower.items()):
            held.update(dict.fromkeys(manager.full_hashes(), tier))
        held |= dict.fromkeys(map(checkpoint_hash, self._device.checkpointed_hashes()), Tier.DEVICE)
        return held | dict.fromkeys(self._device.full_hashes(), Tier.DEVICE)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block and every place is in one state, and only loads hold places."""
        self._device.check_integrity()
        for tier, manager in self._lower.items():
            manager.check_integrity()
            sources = [source for load in self._loads.values() for source in load.order.sources]
            held = {source.place for source in sources if source.tier is tier}
            assert manager.num_blocks - manager.num_available == len(held), f"{tier.name}: places held without a load"

    def _source(self, prefix_hash: bytes, piece: tuple[bytes, int] | None) -> int | None:
        """Return the source of a copy to disk: the block with this hash, or the number of a piece; see KVPool.copy_out.

        None if the device has lost it. piece: the value in `_unsaved`.
        """
        if piece is None:
            return self._device.block_of(prefix_hash) if prefix_hash in self._device else None
        block_hash, number = piece
        index = self._device.checkpoint_index(block_hash)
        return None if index is None else self._sources.first_piece(index) + number

    def _has_room(self, tier: Tier) -> bool:
        """Return True if a checkpoint takes at most half of a tier."""
        return tier in self._lower and self._num_pieces * 2 <= self._lower[tier].num_blocks

    def _evicted_checkpoint(self, index: int, prefix_hash: bytes) -> None:
        """Save a checkpoint to the first lower tier, if that has room. index: of its state slot or part."""
        if self._has_room(next(iter(self._lower))):
            first = self._sources.first_piece(index)
            pieces = range(self._num_pieces)
            self._evicted += [(first + i, checkpoint_hash(prefix_hash, piece=i)) for i in pieces]

    def _tier_of(self, prefix_hash: bytes) -> Tier | None:
        if prefix_hash in self._device or prefix_hash in self._first_pieces:
            return Tier.DEVICE
        return next((tier for tier, manager in self._lower.items() if prefix_hash in manager), None)

    def _save(self, block: int, prefix_hash: bytes, done: list[TierOrders]) -> None:
        """Order a copy of a block or piece to the first lower tier.

        Orders that must be executed first are appended to `done`.
        """
        tier, manager = next(iter(self._lower.items()))
        orders = self._orders
        num_spills = len(orders.spills)
        if prefix_hash in manager:
            if block >= self._sources.first_piece(0):
                _refresh(manager, prefix_hash)
            return
        if (place := _take(manager, prefix_hash)) is None:
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
                _refresh(manager, prefix_hash)
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
            self.num_hits[source.tier] += i < load.num_hits
        for source in load.broken(first_piece=self._sources.first_piece(0), num_pieces=self._num_pieces):
            self._lower[source.tier].discard(source.prefix_hash)


def _take(manager: BlockAllocator, prefix_hash: bytes) -> int | None:
    """Allocate a place for this block. Returns None if loads hold them all."""
    taken = manager.allocate([], 1)
    if taken is None:
        return None
    [place], _ = taken
    manager.fill_block(place, prefix_hash)
    manager.free([place])
    return place


def _refresh(manager: BlockAllocator, prefix_hash: bytes) -> None:
    """Evict this block or piece last.

    Refreshed in order, the first piece of a checkpoint is evicted first: routers look for that one only.
    """
    taken = manager.allocate([prefix_hash], 1)
    assert taken, "a block that is present needs no place"
    manager.free(taken[0])
