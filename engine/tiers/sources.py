"""Sources of a load: the places in lower tiers of the blocks and checkpoints that a sequence continues from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from core.types.prefix_hash import checkpoint_hash
from core.types.tier import Tier
from engine.kv.block_allocator import BlockAllocator
from engine.kv.block_manager import BlockManager
from engine.kv.window_manager import WindowManager

# Tier that holds a block or piece, and the tier's allocator.
Place = tuple[Tier, BlockAllocator]


class Target(NamedTuple):
    """Block, or piece of a checkpoint, to load from a tier."""

    tier: Tier
    manager: BlockAllocator
    prefix_hash: bytes
    block: int  # on the device; or a piece: see KVPool.copy_out


@dataclass
class LoadPlan:
    """Content of a load: blocks, pieces of checkpoints, and blocks to copy on the device."""

    blocks: list[Target] = field(default_factory=list)
    pieces: list[Target] = field(default_factory=list)
    # Source, target.
    copies: list[tuple[int, int]] = field(default_factory=list)


class Sources:
    """Look-ups of a TierTable in its allocators. Changes none of them.

    A cached block that has lost its part cannot get it back in place, because others may hold it. The load fills a new
    block instead: its layers without a window are copied on the device, and its part comes from a lower tier.
    """

    def __init__(self, device: BlockManager, lower: Mapping[Tier, BlockAllocator], *, num_pieces: int) -> None:
        """num_pieces: see KVLayout."""
        self._device = device
        self._lower = lower
        self._num_pieces = num_pieces

    def find(self, hashes: Iterable[bytes]) -> list[Place]:
        """Return the place of each leading block or piece in a lower tier, up to the first that is in none."""
        found = []
        for prefix_hash in hashes:
            place = next(((t, manager) for t, manager in self._lower.items() if prefix_hash in manager), None)
            if place is None:
                break
            found.append(place)
        return found

    def num_present(self, hashes: Sequence[bytes]) -> int:
        """Count the leading blocks that are on the device or in a lower tier."""
        return next(
            (i for i, one in enumerate(hashes) if one not in self._device and not self.find([one])), len(hashes)
        )

    def with_state(self, hashes: Sequence[bytes]) -> tuple[int, list[Tier]]:
        """Return the number of blocks up to the last checkpoint in any tier, and the tiers of all that must be loaded.

        Returns 0 and no tiers if the device has that checkpoint or a later one.
        """
        num_here = self._device.match(hashes)
        tiers = [tier for tier, _ in self.find(hashes[num_here:])]
        for depth in range(num_here + len(tiers), self._device.match_reusable(hashes), -1):
            if (pieces := self._find_state(hashes[depth - 1])) is not None:
                return depth, [*tiers[: max(0, depth - num_here)], *(tier for tier, _ in pieces)]
        return 0, []

    def with_parts(self, windows: WindowManager, hashes: Sequence[bytes]) -> tuple[int, list[Tier]]:
        """Like `with_state`, up to the last block behind which a query finds, in any tier, all parts that it sees."""
        has_part = self._device.has_part
        depth = windows.match(
            self.num_present(hashes),
            lambda place: has_part(hashes[place]) or self._find_pieces(hashes[place]) is not None,
        )
        places = [self.find([one]) for one in hashes[:depth] if one not in self._device]
        places += [self._find_pieces(hashes[i]) or [] for i in windows.seen_from(depth) if not has_part(hashes[i])]
        return depth, [tier for found in places for tier, _ in found]

    def plan(self, hashes: Sequence[bytes], blocks: Sequence[int], state: tuple[bytes, int] | None) -> LoadPlan | None:
        """Return what to load, as TierTable.begin describes it; None if something that is needed is missing."""
        if self._device.windows:
            return self._plan_with_parts(self._device.windows, hashes, blocks)
        found = self.find(hashes)
        targets = zip(found, hashes, blocks, strict=False)
        plan = LoadPlan([Target(*place, prefix_hash, block) for place, prefix_hash, block in targets])
        if state and self._device.states:
            checkpoint, slot = state
            if len(found) < len(hashes) or (pieces := self._find_state(checkpoint)) is None:
                return None
            plan.pieces = self.targets_of(checkpoint, pieces, self._device.states.index(slot))
        return plan

    def _plan_with_parts(
        self, windows: WindowManager, hashes: Sequence[bytes], blocks: Sequence[int]
    ) -> LoadPlan | None:
        plan, seen = LoadPlan(), windows.seen_from(len(hashes))
        for place, (prefix_hash, block) in enumerate(zip(hashes, blocks, strict=False)):
            known = self._device.block_of(prefix_hash) if prefix_hash in self._device else None
            if known == block:
                continue
            if known is not None:
                plan.copies.append((known, block))
            elif found := self.find([prefix_hash]):
                plan.blocks.append(Target(*found[0], prefix_hash, block))
            else:
                return None
            if place in seen:
                part, pieces = windows.part_of(block), self._find_pieces(prefix_hash)
                assert part is not None, f"block {block} has no part to load to"
                if pieces is None:
                    return None
                plan.pieces += self.targets_of(prefix_hash, pieces, part)
        return plan

    def targets_of(self, prefix_hash: bytes, pieces: Sequence[Place], index: int) -> list[Target]:
        """Return the targets of all pieces of a checkpoint. index: of the state slot or part in the pool."""
        first = self.first_piece(index)
        return [Target(*place, checkpoint_hash(prefix_hash, piece=i), first + i) for i, place in enumerate(pieces)]

    def first_piece(self, index: int) -> int:
        """Return the number of the first piece of a state slot or part in the pool; see KVPool.copy_out."""
        return self._device.num_blocks + index * self._num_pieces

    def _find_state(self, prefix_hash: bytes) -> list[Place] | None:
        """Like `_find_pieces`, but empty if the state is on the device."""
        assert self._device.states
        return [] if prefix_hash in self._device.states else self._find_pieces(prefix_hash)

    def _find_pieces(self, prefix_hash: bytes) -> list[Place] | None:
        """Return the place of each piece of a block's checkpoint in a lower tier; None if one is missing."""
        found = self.find(checkpoint_hash(prefix_hash, piece=i) for i in range(self._num_pieces))
        return found if len(found) == self._num_pieces else None
