"""In-memory prefix index: the replicas and tiers that hold each block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from core.types.tier import Tier

_LONG = 256  # blocks of a prefix above which matching bisects
_WIDTH = len(Tier)


class Depths(NamedTuple):
    """Number of leading blocks of a prefix that a replica holds, per tier."""

    device: int
    host: int  # on the device or in host memory
    disk: int  # in any tier
    blocks: int = 0  # on the device, with or without checkpoints; 0: as many as `device`


NOTHING = Depths(0, 0, 0)


class PrefixIndex:
    """Map from block hash to the replicas that hold it. Matching costs one dictionary look-up per block, fewer for long
    prefixes.

    Each replica has three bits per block: it is on the device; on the device or in host memory; in any tier. Dropping a
    replica clears its bits at once without a walk over its blocks. Entries without a live holder are swept when dead
    bits outnumber the live ones.
    """

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._shifts: dict[str, int] = {}  # position of each replica's bits; the lowest is the device's
        self._names: dict[int, str] = {}
        self._next_shift = 0
        self._alive = 0
        self._masks: dict[int, int] = {}  # interned masks
        # Blocks that a replica is about to compute, with their bits from before `expect`.
        self._expected: dict[str, dict[bytes, int]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def store(self, replica: str, hashes: Iterable[bytes], tier: Tier = Tier.DEVICE) -> None:
        """Record that `replica` holds these blocks in this tier and in none above it."""
        hashes = list(hashes)
        if expected := self._expected.get(replica):
            for prefix_hash in hashes:
                expected.pop(prefix_hash, None)
        self._set(replica, hashes, _bits(tier))

    def remove(self, replica: str, hashes: Iterable[bytes]) -> None:
        """Record that `replica` no longer holds these blocks."""
        self._set(replica, hashes, 0)

    def expect(self, replica: str, hashes: Sequence[bytes]) -> None:
        """Treat these blocks as held: `replica` was given a prompt that computes them.

        Call `settle` when that prompt ends.
        """
        shift = self._shift(replica)
        bits = {prefix_hash: self._holders.get(prefix_hash, 0) >> shift & _ALL for prefix_hash in hashes}
        new = {prefix_hash: held for prefix_hash, held in bits.items() if held != _ALL}
        self._expected.setdefault(replica, {}).update(new)
        self._set(replica, new, _ALL)

    def settle(self, replica: str, hashes: Iterable[bytes]) -> None:
        """Withdraw `expect` for these blocks, except for those stored since."""
        if expected := self._expected.get(replica):
            for prefix_hash in hashes:
                if (held := expected.pop(prefix_hash, None)) is not None:
                    self._set(replica, [prefix_hash], held)

    def drop(self, replica: str) -> None:
        """Forget all blocks of `replica`, which left or restarted empty."""
        self._expected.pop(replica, None)
        if (shift := self._shifts.pop(replica, None)) is not None:
            del self._names[shift]
            self._alive &= ~(_ALL << shift)
            if not self._alive:
                self._holders.clear()
            elif len(self._shifts) * 2 * _WIDTH < self._next_shift:
                self._sweep()

    def match(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Return the number of leading blocks on each replica's device; replicas without any are left out."""
        return {replica: depths.device for replica, depths in self.depths(hashes).items() if depths.device}

    def depths(self, hashes: Sequence[bytes]) -> dict[str, Depths]:
        """Return how deep each replica holds the prefix; replicas without any block are left out.

        Long prefixes are bisected: a replica that holds a block nearly always holds the blocks before it, because tails
        are evicted before heads.
        """
        if not self._alive or not hashes:
            return {}
        walk = self._bisect if len(hashes) > _LONG else self._walk
        return self._depths_by_replica(walk(hashes, self._alive))

    def depths_to_checkpoints(
        self, hashes: Sequence[bytes], checkpoints: Sequence[bytes], *, among: Mapping[str, int]
    ) -> dict[str, Depths]:
        """Return how deep each replica can continue the prefix, for models with recurrent layers or freed windows.

        A replica that needs n checkpoints (CacheShape.num_checkpoints) can continue after a block if each of the last n
        blocks up to it has a checkpoint, or every block if there are fewer. Returns the last such block of each tier.
        checkpoints: `checkpoint_hash` of each block. among: n of each replica that reports checkpoints. Replicas of an
        older version report none, so all of their blocks count.
        """
        depths = self.depths(hashes)
        held = {replica: depths[replica] for replica in depths.keys() & among.keys()}
        found = {replica: [0] * _WIDTH for replica in held}
        missing = {(replica, tier) for replica in held for tier in Tier}
        # From the last block to the first: ends of the runs of checkpoints that reach the current one.
        run_ends: dict[tuple[str, Tier], int] = {}
        for depth in range(max((one.disk for one in held.values()), default=0), 0, -1):
            if not (holding := self._holders.get(checkpoints[depth - 1], 0) & self._alive):
                run_ends.clear()
                continue
            for replica, tier in list(missing):
                if depth > held[replica][tier] or not holding >> self._shifts[replica] + tier & 1:
                    run_ends.pop((replica, tier), None)
                    continue
                end = run_ends.setdefault((replica, tier), depth)
                if end - depth + 1 == min(end, among[replica]):
                    found[replica][tier] = end
                    missing.remove((replica, tier))
            if not missing:
                break
        continued = {replica: Depths(*ends)._replace(blocks=held[replica].device) for replica, ends in found.items()}
        return {replica: one for replica in depths if any(one := continued.get(replica, depths[replica]))}

    def _walk(self, hashes: Sequence[bytes], walking: int) -> list[tuple[int, int]]:
        """Check every block. Returns pairs (mask of bits, number of leading blocks that all of them hold)."""
        depths: list[tuple[int, int]] = []
        for depth, prefix_hash in enumerate(hashes):
            holding = self._holders.get(prefix_hash, 0) & walking
            if holding != walking:
                if depth:
                    depths.append((walking & ~holding, depth))
                walking = holding
                if not walking:
                    return depths
        return [*depths, (walking, len(hashes))]

    def _bisect(self, hashes: Sequence[bytes], walking: int) -> list[tuple[int, int]]:
        """Like `_walk`, but check only between two blocks with different holders."""
        depths: list[tuple[int, int]] = []
        last = len(hashes) - 1
        walking &= self._holders.get(hashes[0], 0)
        spans = [(0, last, self._holders.get(hashes[last], 0))]  # (first block, last block, holders of the last)
        # Leftmost span first. All bits of `walking` hold its first block.
        while spans and walking:
            low, high, holding = spans.pop()
            if not walking & ~holding:
                continue
            if high - low == 1:
                depths.append((walking & ~holding, high))
                walking &= holding
                continue
            middle = (low + high) // 2
            spans.append((middle, high, holding))
            spans.append((low, middle, self._holders.get(hashes[middle], 0)))
        return [*depths, (walking, len(hashes))] if walking else depths

    def _depths_by_replica(self, dropouts: Iterable[tuple[int, int]]) -> dict[str, Depths]:
        found: dict[str, list[int]] = {}
        for mask, depth in dropouts:
            while mask:
                low = mask & -mask
                shift, tier = divmod(low.bit_length() - 1, _WIDTH)
                found.setdefault(self._names[shift * _WIDTH], [0] * _WIDTH)[tier] = depth
                mask ^= low
        return {replica: Depths(*depths) for replica, depths in found.items()}

    def _set(self, replica: str, hashes: Iterable[bytes], bits: int) -> None:
        """Set the replica's bits of these blocks to exactly `bits`."""
        shift = self._shift(replica)
        others, bits = self._alive & ~(_ALL << shift), bits << shift
        holders, masks = self._holders, self._masks
        for prefix_hash in hashes:
            if mask := holders.get(prefix_hash, 0) & others | bits:
                holders[prefix_hash] = masks.setdefault(mask, mask)
            else:
                holders.pop(prefix_hash, None)

    def _shift(self, replica: str) -> int:
        if replica not in self._shifts:
            self._shifts[replica] = self._next_shift
            self._names[self._next_shift] = replica
            self._alive |= _ALL << self._next_shift
            self._next_shift += _WIDTH
        return self._shifts[replica]

    def _sweep(self) -> None:
        """Renumber the live replicas' bits from 0 and drop entries that only dead replicas held."""
        old_shifts = list(self._shifts.values())
        self._shifts = {replica: i * _WIDTH for i, replica in enumerate(self._shifts)}
        self._names = {shift: replica for replica, shift in self._shifts.items()}
        self._next_shift = len(self._shifts) * _WIDTH
        self._alive = (1 << self._next_shift) - 1
        old, self._holders, self._masks = self._holders, {}, {}
        for prefix_hash, holders in old.items():
            if mask := sum((holders >> shift & _ALL) << i * _WIDTH for i, shift in enumerate(old_shifts)):
                self._holders[prefix_hash] = self._masks.setdefault(mask, mask)


_ALL = (1 << _WIDTH) - 1


def _bits(tier: Tier) -> int:
    """Return the bits of a block in `tier`: it counts for its own tier and for all slower ones."""
    return _ALL & ~((1 << tier) - 1)
