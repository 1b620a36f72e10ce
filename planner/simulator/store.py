"""KV blocks of one simulated replica: the device pool, and an optional host tier.

Both use the real engine's block manager and eviction. Blocks evicted from the device go to the host; blocks that a
request finds there are copied back.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.index.prefix_index import PrefixIndex
from engine.kv.block_manager import BlockManager
from engine.kv.eviction import make_eviction
from planner.simulator.clock import Clock


class Store:
    """Block store of one replica, which publishes its changes to the router's indexes."""

    def __init__(
        self,
        replica: str,
        clock: Clock,
        *,
        num_blocks: int,
        num_host_blocks: int,
        eviction: str,
        device: PrefixIndex,
        stored: PrefixIndex,
    ) -> None:
        """device, stored: the router's indexes of blocks on devices, and of blocks in any tier."""
        self.replica = replica
        self.blocks = _manager(num_blocks, eviction, clock)
        self.host = _manager(num_host_blocks, eviction, clock) if num_host_blocks else None
        self._device = device
        self._stored = stored

    def publish(self) -> None:
        """Update the indexes with the changes since the last call, and move evicted blocks to the host."""
        changes = self.blocks.take_changes()
        if not changes:
            return
        removed = [prefix_hash for prefix_hash, is_held in changes.items() if not is_held]
        added = [prefix_hash for prefix_hash, is_held in changes.items() if is_held]
        self._device.store(self.replica, added)
        self._device.remove(self.replica, removed)
        if self.host is None:
            return
        for prefix_hash in removed:
            if not self.host.match([prefix_hash]):
                self._keep(self.host, prefix_hash)
        lost = [prefix_hash for prefix_hash, is_held in self.host.take_changes().items() if not is_held]
        self._stored.store(self.replica, added)
        self._stored.remove(self.replica, [prefix_hash for prefix_hash in lost if not self.blocks.match([prefix_hash])])

    def held(self, hashes: Sequence[bytes]) -> int:
        """Return the number of leading blocks held in either tier."""
        depth = self.blocks.match(hashes)
        while depth < len(hashes) and (
            self.blocks.match([hashes[depth]]) or (self.host and self.host.match([hashes[depth]]))
        ):
            depth += 1
        return depth

    def restore(self, hashes: Sequence[bytes]) -> list[int] | None:
        """Hold blocks, whose content has arrived, on the device. Return their ids, or None if there is no room."""
        if self.host:
            taken = self.host.allocate(hashes, self.host.match(hashes))
            self.host.free(taken[0] if taken else [])
        return self.blocks.restore(hashes)

    def _keep(self, host: BlockManager, prefix_hash: bytes) -> None:
        if taken := host.allocate([], 1):
            host.fill_block(taken[0][0], prefix_hash)
            host.free(taken[0])


def _manager(num_blocks: int, eviction: str, clock: Clock) -> BlockManager:
    return BlockManager(num_blocks, make_eviction(eviction, num_blocks=num_blocks, clock=lambda: clock.now))
