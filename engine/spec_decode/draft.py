"""Tokens that a step computes behind those of a sequence, though nobody knows yet whether they are its next ones.

A draft may branch. Each branch is a row of its own, forked from the sequence as another choice would be: it shares the
full blocks, has a copy of the one that is not full, and computes again what lies between there and its first token. So
it is a row like any other to whoever computes and ships rows, and no attention knows of trees:

    sequence   ... full blocks | n - 1, draft 0, draft 1, draft 2
    branch     (the same)      | n - 1, draft 0, other 1, other 2        place 1: one draft token is before it

Where the sequence goes on as a branch does, it takes that one's blocks for its own; all others go back.
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
    """What may follow instead of a draft's tokens, from one of them on."""

    place: int  # tokens of the draft that are before it
    tokens: Seq[int]
    num_again: int  # tokens that are computed for it once more: the sequence's own, and those before it
    blocks: list[int]  # instead of the sequence's, from the first that was not full
    first_logits: int = field(default=-1, init=False)  # where its logits begin, once somebody has counted

    @property
    def num_tokens(self) -> int:
        """That it computes."""
        return self.num_again + len(self.tokens)

    def row(self, sequence: Sequence, draft: Draft) -> Row:
        """Its row of the step. As long as nothing of that is booked."""
        own = sequence.tokens[sequence.num_computed :]
        return Row(
            token_ids=[*own, *draft.tokens[: self.place], *self.tokens],
            start=sequence.num_computed,
            blocks=[*sequence.blocks[: _num_shared(sequence)], *self.blocks],
            num_logits=len(self.tokens),
            adapter=sequence.adapter,
        )

    def copy(self, sequence: Sequence) -> tuple[int, int] | None:
        """The block to be copied before the step, and where to; None where none is partly filled."""
        is_partly = sequence.num_computed % sequence.block_size > 0
        return (sequence.blocks[_num_shared(sequence)], self.blocks[0]) if is_partly else None

    def take_over(self, sequence: Sequence) -> None:
        """The sequence goes on here, before anything of the step is booked: its table is another one from now on, also
        for whoever has kept the old. The blocks that it has had instead are this branch's, to be given back."""
        first, end = _num_shared(sequence), _num_shared(sequence) + len(self.blocks)
        replaced = sequence.blocks[first:end]
        sequence.blocks = [*sequence.blocks[:first], *self.blocks, *sequence.blocks[end:]]
        self.blocks = replaced


class Right(NamedTuple):
    """Of a draft, the tokens that are the sequence's next ones."""

    num_first: int  # the draft's own
    branch: Branch | None  # that was taken behind them
    num_then: int  # of that

    @property
    def num_tokens(self) -> int:
        return self.num_first + self.num_then


@dataclass(eq=False, slots=True, kw_only=True)
class Draft:
    """Of one row of one step."""

    tokens: Seq[int]
    num_blocks: int  # that the sequence had before
    method: str = ""
    branches: list[Branch] = field(default_factory=list)
    first_logits: int = field(default=-1, init=False)  # where the row's logits begin, once somebody has counted

    @property
    def num_tokens(self) -> int:
        """That are computed beside the row's own."""
        return len(self.tokens) + sum(branch.num_tokens for branch in self.branches)

    @property
    def num_guessed(self) -> int:
        """Of these, those that nobody knew."""
        return len(self.tokens) + sum(len(branch.tokens) for branch in self.branches)

    @property
    def depth(self) -> int:
        """Tokens behind the row's own, on the longest way."""
        return max([len(self.tokens), *(branch.place + len(branch.tokens) for branch in self.branches)])

    def branch_at(self, place: int, token: int) -> Branch | None:
        """The one that goes on with this token behind so many of the draft."""
        return next((one for one in self.branches if one.place == place and one.tokens[0] == token), None)

    def right(self, chosen: Seq[int]) -> Right:
        """What of it was chosen."""
        place = _num_equal(self.tokens, chosen)
        branch = self.branch_at(place, chosen[place]) if place < len(chosen) else None
        return Right(place, branch, _num_equal(branch.tokens, chosen[place:]) if branch else 0)

    def give_back(self, sequence: Sequence, blocks: BlockManager) -> None:
        """The blocks that were taken for what has turned out to be wrong."""
        kept = max(self.num_blocks, sequence.num_blocks_for(sequence.num_computed))
        blocks.free(sequence.blocks[kept:])
        del sequence.blocks[kept:]
        for branch in self.branches:
            blocks.free(branch.blocks)


def take_room(sequence: Sequence, num_tokens: int, blocks: BlockManager) -> int:
    """For the KV of so many drafted tokens, or of as many as there is room for. No other sequence loses a block."""
    if not blocks.extend(sequence.blocks, sequence.num_blocks_for(len(sequence.tokens) + num_tokens)):
        num_tokens = len(sequence.blocks) * sequence.block_size - len(sequence.tokens)
    return num_tokens


def fork(sequence: Sequence, place: int, tokens: Seq[int], blocks: BlockManager) -> Branch | None:
    """A branch of the draft that the sequence is about to get. None, taking nothing, if there is no room for it."""
    own: list[int] = []
    num_blocks = sequence.num_blocks_for(len(sequence.tokens) + place + len(tokens)) - _num_shared(sequence)
    if not blocks.extend(own, num_blocks):
        return None
    return Branch(place=place, tokens=tokens, num_again=sequence.num_missing + place, blocks=own)


def _num_shared(sequence: Sequence) -> int:
    """Blocks that are full, whatever this step computes."""
    return sequence.num_computed // sequence.block_size


def _num_equal(tokens: Seq[int], chosen: Seq[int]) -> int:
    pairs = zip(tokens, chosen, strict=False)
    return next((i for i, (token, other) in enumerate(pairs) if token != other), min(len(tokens), len(chosen)))
