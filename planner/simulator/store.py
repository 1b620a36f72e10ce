"""KV blocks of simulated replicas: the device pool and an optional host tier of each, and the router's indexes of them.

Both tiers use the real engine's allocators and eviction, with its rules for states and windows. Blocks and states
evicted from the device go to the host; those that a request finds there are copied back. With a host tier, no window is
freed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from core.index.prefix_index import Depths, PrefixIndex
from core.model.kv_memory import CacheShape
from core.types.prefix_hash import checkpoint_hash
from engine.kv.block_allocator import BlockAllocator
from engine.kv.block_manager import BlockManager
from engine.kv.eviction import make_eviction
from engine.kv.window_manager import HeldParts, WindowManager
from engine.scheduler.sequence import Sequence as TokenSequence
from planner.simulator.clock import Clock, Cores
from planner.simulator.profile import FleetSetup, Profile


class Indexes:
    """The router's indexes of blocks on devices, and of blocks in any tier."""

    def __init__(self, *, cache: CacheShape, has_host: bool) -> None:
        """has_host: replicas have a host tier."""
        self.device = PrefixIndex()
        self.stored = PrefixIndex() if has_host else self.device
        self._cache = cache

    def depths(self, hashes: Sequence[bytes], replicas: Set[str]) -> tuple[Mapping[str, Depths], Mapping[str, Depths]]:
        """Return how deep each replica can continue a prompt, from its device and from any tier."""
        indexes = dict.fromkeys((self.device, self.stored))
        if num_checkpoints := self._cache.num_checkpoints:
            checkpoints, among = list(map(checkpoint_hash, hashes)), dict.fromkeys(replicas, num_checkpoints)
            found = [index.depths_to_checkpoints(hashes, checkpoints, among=among) for index in indexes]
        else:
            found = [index.depths(hashes) for index in indexes]
        return found[0], found[-1]

    def drop(self, replica: str) -> None:
        """Forget all blocks of a replica."""
        self.device.drop(replica)
        self.stored.drop(replica)


@dataclass(frozen=True, kw_only=True)
class Site:
    """Environment that all replicas of a simulated cluster share."""

    setup: FleetSetup
    profile: Profile
    clock: Clock
    cores: Cores
    indexes: Indexes


@dataclass
class Held:
    """Blocks and state slot of a computed prompt until they are shipped, with their parts in layers with a window."""

    ids: list[int]
    parts: HeldParts = field(default_factory=HeldParts)


class Store:
    """Block store of one replica, which publishes its changes to the router's indexes."""

    def __init__(self, replica: str, site: Site, *, max_batch_tokens: int) -> None:
        """max_batch_tokens: limit of a step."""
        self.replica = replica
        setup, kv, clock = site.setup, site.profile.kv, site.clock
        size, num_host_blocks = setup.block_size, setup.host_tokens // setup.block_size
        sizes = kv.pool_sizes(setup.kv_tokens, block_size=size, max_batch_tokens=max_batch_tokens)
        windows = None
        if sizes.num_window_parts is not None:
            windows = WindowManager(
                sizes.num_window_parts,
                num_blocks=sizes.num_blocks,
                window=kv.window,
                block_size=size,
                max_batch_tokens=max_batch_tokens,
            )
        self._eviction = make_eviction(setup.eviction, num_blocks=sizes.num_blocks, clock=lambda: clock.now)
        self.blocks = BlockManager(sizes.num_blocks, self._eviction, num_states=sizes.num_states, windows=windows)
        self.host: BlockAllocator | None = None
        self._tiers: list[BlockAllocator] = [self.blocks]
        if num_host_blocks:
            host_eviction = make_eviction(setup.eviction, num_blocks=num_host_blocks, clock=lambda: clock.now)
            self.host = BlockAllocator(num_host_blocks, host_eviction)
            self._tiers.append(self.host)
        self._indexes = site.indexes
        self._pieces = range(kv.pool_cache(size).num_pieces)  # of a state in the host tier
        self._evicted_states: list[bytes] = []
        self._checkpoints: set[bytes] = set()  # checkpoint hashes of states on the device
        if states := self.blocks.states:
            states.checkpoint_every(setup.checkpoint_tokens, block_size=size)
            if self.host:
                states.on_evict = lambda index, prefix_hash: self._evicted_states.append(prefix_hash)

    def publish(self) -> None:
        """Update the indexes with the changes since the last call, and move what was evicted to the host."""
        changes, evicted_states = self.blocks.take_changes(), self._evicted_states
        evicted = [prefix_hash for prefix_hash, is_held in changes.items() if not is_held]
        evicted += [piece for prefix_hash in evicted_states for piece in self._pieces_of(prefix_hash)]
        self._evicted_states = []
        for prefix_hash, is_held in self.blocks.take_checkpoint_changes().items():
            changes[checkpoint := checkpoint_hash(prefix_hash)] = is_held
            (self._checkpoints.add if is_held else self._checkpoints.discard)(checkpoint)
        if not changes:
            return
        added = [prefix_hash for prefix_hash, is_held in changes.items() if is_held]
        removed = [prefix_hash for prefix_hash, is_held in changes.items() if not is_held]
        self._indexes.device.store(self.replica, added)
        self._indexes.device.remove(self.replica, removed)
        if self.host is None:
            return
        for prefix_hash in evicted:
            if prefix_hash not in self.host and (taken := self.host.allocate([], 1)):
                self.host.fill_block(taken[0][0], prefix_hash)
                self.host.free(taken[0])
        lost = [prefix_hash for prefix_hash, is_held in self.host.take_changes().items() if not is_held]
        self._indexes.stored.store(self.replica, added)
        gone = [one for one in (*lost, *removed) if not (self._holds(one) or one in self._checkpoints)]
        self._indexes.stored.remove(self.replica, gone)

    def num_fetchable(self, hashes: Sequence[bytes]) -> int:
        """Return how many of the blocks with `hashes`, in either tier, a fetch brings."""
        if self.blocks.windows:
            # Such a prefix is shipped whole or not at all; see PrefixFetches.begin.
            return len(hashes) if self.blocks.match_reusable(hashes) == len(hashes) else 0
        depth = next((i for i, one in enumerate(hashes) if not self._holds(one)), len(hashes))
        while self.blocks.states and depth and not self._has_state(hashes[depth - 1]):
            depth -= 1
        return depth

    def restore(self, hashes: Sequence[bytes]) -> list[int]:
        """Hold blocks, whose content has arrived, on the device. Return their ids; empty if there is no room.

        The state behind them becomes a checkpoint. The parts that the next query sees stay cached, if all fit.
        """
        if self.host:
            # Mark the blocks in the host tier as used.
            found = self.host.allocate(hashes, self.host.match(hashes))
            self.host.free(found[0] if found else [])
        is_new = [prefix_hash not in self.blocks for prefix_hash in hashes]
        taken = self.blocks.allocate(hashes, len(hashes), to_load=())
        if not hashes or taken is None:
            return []
        blocks, windows, states = taken[0], self.blocks.windows, self.blocks.states
        if windows:
            parts = [blocks[place] for place in windows.seen_from(len(hashes)) if is_new[place]]
            parts = parts if len(parts) <= windows.num_available else []
            windows.attach(parts)
        for place in itertools.compress(range(len(hashes)), is_new):
            self._eviction.restored(hashes[place])
            self.blocks.fill_block(blocks[place], hashes[place])
        if windows:
            windows.drop(parts)
        if states and hashes[-1] not in states and states.num_available:
            states.fill_slot(states.take(), hashes[-1])
        return blocks

    def hold(self, sequence: TokenSequence) -> Held:
        """Hold what a handoff of a sequence ships, as the engine's outgoing transfers do."""
        held = Held([*sequence.blocks, *sequence.state_slots[:1]])
        self.blocks.share(held.ids)
        if windows := self.blocks.windows:
            num_tokens = len(sequence.tokens)
            held.parts.reserve(windows.num_for(num_tokens), windows)
            held.parts.hold(sequence.blocks, windows.first_seen(num_tokens), len(sequence.blocks), windows)
        return held

    def release(self, held: Held) -> None:
        """Free what was held, and publish the changes."""
        if self.blocks.windows:
            held.parts.release(self.blocks.windows)
        self.blocks.free(held.ids)
        self.publish()

    def _holds(self, prefix_hash: bytes) -> bool:
        return any(prefix_hash in tier for tier in self._tiers)

    def _pieces_of(self, prefix_hash: bytes) -> list[bytes]:
        return [checkpoint_hash(prefix_hash, piece=piece) for piece in self._pieces]

    def _has_state(self, prefix_hash: bytes) -> bool:
        """Return True if a tier has the state at the end of this block."""
        if self.blocks.states and prefix_hash in self.blocks.states:
            return True
        return self.host is not None and all(piece in self.host for piece in self._pieces_of(prefix_hash))
