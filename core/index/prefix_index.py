"""The prefix index in memory: which replica holds which block, and in which tier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from core.types.tier import Tier

_LONG = 256  # blocks of a prefix in which not each is looked at
_WIDTH = len(Tier)


class Depths(NamedTuple):
    """How many leading blocks of a prefix a replica holds."""

    device: int
    host: int  # there or in memory
    disk: int  # anywhere


class PrefixIndex:
    """Hash to holders. Matching costs a dictionary look-up per block, or fewer where the prefix is long.

    Each replica is three bits: that it holds a block on the device; there or in memory; anywhere. A replica that is
    dropped loses its bits at once, without a walk over its blocks; entries that nobody alive holds are swept when they
    outnumber the others.
    """

    def __init__(self) -> None:
        self._prefix_sources: dict[bytes, int] = {}
        self._shifts: dict[str, int] = {}  # of each replica's bits; the first is the device's
        self._names: dict[int, str] = {}
        self._next_shift = 0
        self._alive = 0
        self._masks: dict[int, int] = {}  # one object for all equal values
        self._expected: dict[str, dict[bytes, int]] = {}  # blocks to be computed, and the bits that are true meanwhile

    def __len__(self) -> int:
        return len(self._prefix_sources)

    def store(self, replica: str, hashes: Iterable[bytes], tier: Tier = Tier.DEVICE) -> None:
        """`replica` holds these blocks in this tier, and in none above it."""
        hashes = list(hashes)
        if expected := self._expected.get(replica):
            for prefix_hash in hashes:
                expected.pop(prefix_hash, None)
        self._set(replica, hashes, _bits(tier))

    def remove(self, replica: str, hashes: Iterable[bytes]) -> None:
        """`replica` no longer holds these blocks."""
        self._set(replica, hashes, 0)

    def expect(self, replica: str, hashes: Sequence[bytes]) -> None:
        """`replica` was given a prompt of these blocks: whoever comes meanwhile may count on them.

        When that prompt is done with, `settle` it.
        """
        shift = self._shift(replica)
        bits = {prefix_hash: self._prefix_sources.get(prefix_hash, 0) >> shift & _ALL for prefix_hash in hashes}
        new = {prefix_hash: held for prefix_hash, held in bits.items() if held != _ALL}
        self._expected.setdefault(replica, {}).update(new)
        self._set(replica, new, _ALL)

    def settle(self, replica: str, hashes: Iterable[bytes]) -> None:
        """What was expected of these blocks and has not come is forgotten; what came has been stored."""
        if expected := self._expected.get(replica):
            for prefix_hash in hashes:
                if (held := expected.pop(prefix_hash, None)) is not None:
                    self._set(replica, [prefix_hash], held)

    def drop(self, replica: str) -> None:
        """`replica` is gone, or starts again with nothing."""
        self._expected.pop(replica, None)
        if (shift := self._shifts.pop(replica, None)) is not None:
            del self._names[shift]
            self._alive &= ~(_ALL << shift)
            if not self._alive:
                self._prefix_sources.clear()
            elif len(self._shifts) * 2 * _WIDTH < self._next_shift:
                self._sweep()

    def match(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of the prefix each replica has on its device; those that have none are left out."""
        return {replica: depths.device for replica, depths in self.depths(hashes).items() if depths.device}

    def depths(self, hashes: Sequence[bytes]) -> dict[str, Depths]:
        """How deep each replica holds the prefix; replicas that hold nothing of it are left out.

        Where a replica drops out of a long prefix is found by bisection: who holds a block has nearly always what comes
        before it, for tails are evicted before heads.
        """
        if not self._alive or not hashes:
            return {}
        walk = self._bisect if len(hashes) > _LONG else self._walk
        return self._depths_by_replica(walk(hashes, self._alive))

    def _walk(self, hashes: Sequence[bytes], walking: int) -> list[tuple[int, int]]:
        """Look at every block: (who drops out, how many leading blocks they hold)."""
        depths: list[tuple[int, int]] = []
        for depth, prefix_hash in enumerate(hashes):
            holding = self._prefix_sources.get(prefix_hash, 0) & walking
            if holding != walking:
                if depth:
                    depths.append((walking & ~holding, depth))
                walking = holding
                if not walking:
                    return depths
        return [*depths, (walking, len(hashes))]

    def _bisect(self, hashes: Sequence[bytes], walking: int) -> list[tuple[int, int]]:
        """As `_walk`, but look only where somebody drops out: between two blocks that are held by others."""
        depths: list[tuple[int, int]] = []
        last = len(hashes) - 1
        walking &= self._prefix_sources.get(hashes[0], 0)
        spans = [
            (0, last, self._prefix_sources.get(hashes[last], 0))
        ]  # (of the first block, of the last, who holds that one)
        while spans and walking:  # the leftmost span comes next; all that walk hold its first block
            low, high, holding = spans.pop()
            if not walking & ~holding:
                continue
            if high - low == 1:
                depths.append((walking & ~holding, high))
                walking &= holding
                continue
            middle = (low + high) // 2
            spans.append((middle, high, holding))
            spans.append((low, middle, self._prefix_sources.get(hashes[middle], 0)))
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
        """These and no other bits of the replica are true of these blocks."""
        shift = self._shift(replica)
        others, bits = self._alive & ~(_ALL << shift), bits << shift
        prefix_sources, masks = self._prefix_sources, self._masks
        for prefix_hash in hashes:
            if mask := prefix_sources.get(prefix_hash, 0) & others | bits:
                prefix_sources[prefix_hash] = masks.setdefault(mask, mask)
            else:
                prefix_sources.pop(prefix_hash, None)

    def _shift(self, replica: str) -> int:
        if replica not in self._shifts:
            self._shifts[replica] = self._next_shift
            self._names[self._next_shift] = replica
            self._alive |= _ALL << self._next_shift
            self._next_shift += _WIDTH
        return self._shifts[replica]

    def _sweep(self) -> None:
        """Renumber the bits of those alive from 0 and forget what only the dead held."""
        old_shifts = list(self._shifts.values())
        self._shifts = {replica: i * _WIDTH for i, replica in enumerate(self._shifts)}
        self._names = {shift: replica for replica, shift in self._shifts.items()}
        self._next_shift = len(self._shifts) * _WIDTH
        self._alive = (1 << self._next_shift) - 1
        old, self._prefix_sources, self._masks = self._prefix_sources, {}, {}
        for prefix_hash, prefix_sources in old.items():
            if mask := sum((prefix_sources >> shift & _ALL) << i * _WIDTH for i, shift in enumerate(old_shifts)):
                self._prefix_sources[prefix_hash] = self._masks.setdefault(mask, mask)


_ALL = (1 << _WIDTH) - 1


def _bits(tier: Tier) -> int:
    """A block counts in its own tier's depth, and in those of the tiers below."""
    return _ALL & ~((1 << tier) - 1)
