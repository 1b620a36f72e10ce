"""Block tables of a draft model: its KV of the served sequences, in its own pool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from engine.kv.block_manager import BlockManager
from engine.scheduler.sequence import Sequence


@dataclass(eq=False, slots=True)
class DraftTable:
    """Block table of one sequence."""

    blocks: list[int] = field(default_factory=list)
    num_known: int = 0  # leading tokens of the sequence with KV
    drafted: list[int] = field(default_factory=list)  # draft tokens with KV behind those
    num_full: int = 0  # blocks


class DraftTables:
    """Cache of KV by sequence, with LRU eviction and shared prefixes. Owned by the step thread.

    Eviction takes the blocks of the least recently drafted sequence; its next draft computes the KV again. Prefixes of
    finished sequences stay until their room is needed.
    """

    def __init__(self, num_blocks: int, *, block_size: int) -> None:
        """block_size: the one that the sequences' block hashes use."""
        self.blocks = BlockManager(num_blocks)
        self._block_size = block_size
        self._tables: OrderedDict[Sequence, DraftTable] = OrderedDict()  # the most recent last

    def __len__(self) -> int:
        return len(self._tables)

    def num_missing(self, sequence: Sequence) -> int:
        """Return the number of tokens to compute before drafting, the last one included. Changes nothing."""
        table = self._tables.get(sequence)
        known = (
            self.blocks.match(self._hashes(sequence)) * self._block_size if table is None else _known(sequence, table)
        )
        return len(sequence.tokens) - min(known, len(sequence.tokens) - 1)

    def open(self, sequence: Sequence, num_tokens: int, *, keep: Collection[Sequence]) -> DraftTable | None:
        """Return the table with room for num_tokens, without rejected draft tokens.

        Returns None if room could only be taken from the sequences in `keep`.
        """
        self.blocks.take_changes()  # not reported to routers; they would pile up
        table = self._tables.get(sequence)
        if table is None:
            table = self._tables[sequence] = DraftTable()
            hashes = self._hashes(sequence)
            found = self.blocks.match(hashes)
            table.blocks, table.num_full = self.blocks.allocate(hashes[:found], found) or ([], 0)
            table.num_known = table.num_full * self._block_size
        table.num_known = min(_known(sequence, table), len(sequence.tokens) - 1)
        table.drafted.clear()
        self._tables.move_to_end(sequence)
        return table if self._make_room(table, -(-num_tokens // self._block_size), keep) else None

    def computed(self, sequence: Sequence, table: DraftTable, num_tokens: int) -> None:
        """Note that the next num_tokens tokens of the sequence are in the pool."""
        table.num_known += num_tokens
        hashes = sequence.hashes()
        while table.num_full < min(table.num_known // self._block_size, len(hashes)):
            self.blocks.fill_block(table.blocks[table.num_full], hashes[table.num_full])
            table.num_full += 1

    def forget(self, sequence: Sequence) -> None:
        """Free the blocks of the sequence, if it has any."""
        if table := self._tables.pop(sequence, None):
            self.blocks.free(table.blocks)

    def _hashes(self, sequence: Sequence) -> list[bytes]:
        """Return the hashes of the full blocks before the last token, which is always computed."""
        return sequence.hashes()[: (len(sequence.tokens) - 1) // self._block_size]

    def _make_room(self, table: DraftTable, num_blocks: int, keep: Collection[Sequence]) -> bool:
        while not self.blocks.extend(table.blocks, num_blocks):
            oldest = next((sequence for sequence in self._tables if sequence not in keep), None)
            if oldest is None:
                return False
            self.forget(oldest)
        # Free what an earlier, longer draft took.
        self.blocks.free(table.blocks[num_blocks:])
        del table.blocks[num_blocks:]
        return True


def _known(sequence: Sequence, table: DraftTable) -> int:
    """Return the number of leading tokens with KV: those computed before, and the accepted draft tokens."""
    known, tokens = table.num_known, sequence.tokens
    for token in table.drafted:
        if known >= len(tokens) or tokens[known] != token:
            break
        known += 1
    return known
