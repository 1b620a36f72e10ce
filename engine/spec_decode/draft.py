"""Drafts: tokens that a step computes behind those of a sequence, before they are known to be the next ones.

A draft may branch. Each branch is a separate row, forked from the sequence like another choice: it shares the full
blocks, copies the partly filled block, and recomputes the tokens between there and its first one. Attention and
transfers handle it like any other row:

    sequence   ... full blocks | n - 1, draft 0, draft 1, draft 2
    branch     (the same)      | n - 1, draft 0, other 1, other 2        place 1: one draft token is before it

If the sequence continues like a branch, it takes over that branch's blocks; all others are freed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.batch.rows import Row
from engine.kv.block_manager import BlockManager
from engine.scheduler.sequence import Sequence


@dataclass(eq=False, slots=True, kw_only=True)
class Branch:
    """Alternative to the tokens of a draft from one place on."""

    place: int  # tokens of the draft that are before it
    tokens: Seq[int]
    num_again: int  # tokens computed once more for it: the sequence's, and draft tokens before it
    blocks: list[int]  # instead of the sequence's, from the first that was not full
    first_logits: int = field(default=-1, init=False)  # index of its first logits; set when the step is laid out

    @property
    def num_tokens(self) -> int:
        """Number of tokens that its row computes."""
        return self.num_again + len(self.tokens)

    def row(self, sequence: Sequence, draft: Draft) -> Row:
        """Return its row of the step. Call only before the step is completed."""
        own = sequence.tokens[sequence.num_computed :]
        return Row(
            token_ids=[*own, *draft.tokens[: self.place], *self.tokens],
            start=sequence.num_computed,
            blocks=[*sequence.blocks[: _num_shared(sequence)], *self.blocks],
            num_logits=len(self.tokens),
            adapter=sequence.adapter,
        )

    def copy(self, sequence: Sequence) -> tuple[int, int] | None:
        """Return (source, target) of the block to copy before the step; None if no block is partly filled."""
        is_partly = sequence.num_computed % sequence.block_size > 0
        return (sequence.blocks[_num_shared(sequence)], self.blocks[0]) if is_partly else None

    def take_over(self, sequence: Sequence) -> None:
        """Give the branch's blocks to the sequence, before the step's KV is recorded.

        The block table is a new list afterwards. The replaced blocks belong to the branch, to be freed with it.
        """
        first, end = _num_shared(sequence), _num_shared(sequence) + len(self.blocks)
        replaced = sequence.blocks[first:end]
        sequence.blocks = [*sequence.blocks[:first], *self.blocks, *sequence.blocks[end:]]
        self.blocks = replaced


class Right(NamedTuple):
    """Accepted part of a draft."""

    num_first: int  # tokens of the draft
    branch: Branch | None  # that continues them
    num_then: int  # tokens of that branch

    @property
    def num_tokens(self) -> int:
        return self.num_first + self.num_then


@dataclass(eq=False, slots=True, kw_only=True)
class Draft:
    """Draft of one row of one step."""

    tokens: Seq[int]
    num_blocks: int  # of the sequence, before the draft
    method: str = ""
    branches: list[Branch] = field(default_factory=list)
    first_logits: int = field(default=-1, init=False)  # index of the row's first logits; set when the step is laid out

    @property
    def num_tokens(self) -> int:
        """Number of tokens computed beside the row's own."""
        return len(self.tokens) + sum(branch.num_tokens for branch in self.branches)

    @property
    def num_guessed(self) -> int:
        """Number of proposed tokens, without those computed again."""
        return len(self.tokens) + sum(len(branch.tokens) for branch in self.branches)

    @property
    def depth(self) -> int:
        """Number of tokens on the longest path."""
        return max([len(self.tokens), *(branch.place + len(branch.tokens) for branch in self.branches)])

    def branch_at(self, place: int, token: int) -> Branch | None:
        """Return the branch that continues with this token after `place` draft tokens."""
        return next((one for one in self.branches if one.place == place and one.tokens[0] == token), None)

    def right(self, chosen: Seq[int]) -> Right:
        """Return the part that equals the chosen tokens."""
        place = _num_equal(self.tokens, chosen)
        branch = self.branch_at(place, chosen[place]) if place < len(chosen) else None
        return Right(place, branch, _num_equal(branch.tokens, chosen[place:]) if branch else 0)

    def give_back(self, sequence: Sequence, blocks: BlockManager) -> None:
        """Free the blocks of rejected tokens."""
        kept = max(self.num_blocks, sequence.num_blocks_for(sequence.num_computed))
        blocks.free(sequence.blocks[kept:])
        del sequence.blocks[kept:]
        for branch in self.branches:
            blocks.free(branch.blocks)


def take_room(sequence: Sequence, num_tokens: int, blocks: BlockManager) -> int:
    """Allocate blocks for up to num_tokens draft tokens. Returns for how many; takes no block of another sequence."""
    if not blocks.extend(sequence.blocks, sequence.num_blocks_for(len(sequence.tokens) + num_tokens)):
        num_tokens = len(sequence.blocks) * sequence.block_size - len(sequence.tokens)
    return num_tokens


def fork(sequence: Sequence, place: int, tokens: Seq[int], blocks: BlockManager) -> Branch | None:
    """Return a branch of the draft that the sequence is about to get; None if there are not enough free blocks."""
    own: list[int] = []
    num_blocks = sequence.num_blocks_for(len(sequence.tokens) + place + len(tokens)) - _num_shared(sequence)
    if not blocks.extend(own, num_blocks):
        return None
    return Branch(place=place, tokens=tokens, num_again=sequence.num_missing + place, blocks=own)


def _num_shared(sequence: Sequence) -> int:
    """Return the number of full blocks before the step."""
    return sequence.num_computed // sequence.block_size


def _num_equal(tokens: Seq[int], chosen: Seq[int]) -> int:
    pairs = zip(tokens, chosen, strict=False)
    return next((i for i, (token, other) in enumerate(pairs) if token != other), min(len(tokens), len(chosen)))
