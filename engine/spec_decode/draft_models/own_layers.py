"""The served model drafts for itself, with some of its layers left out (Zhang et al. 2023, arXiv:2309.08168: draft and
verify)."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.kv.block_manager import BlockManager
from engine.runner.runner import ModelRunner
from engine.scheduler.sequence import Sequence
from engine.spec_decode.draft_models.sampled_drafts import DrawnDraft, DrawnTokens
from engine.spec_decode.proposer import NOTHING, Proposal


class OwnLayers:
    """Implements Computing, for a replica of one rank. There is no state: a draft reads what the layers that stay have
    in the replica's own pool, and puts behind it, from the sequence's last token on, what the step that verifies the
    draft writes anew, for all layers. What lies in blocks beyond the sequence's own is given up at once.

    A third of the layers is left out, those in the middle: what they do is missed least."""

    def __init__(self, runner: ModelRunner, blocks: BlockManager, *, before_writing: Callable[[], None]) -> None:
        """blocks: of the pool. before_writing: sees to it that nobody needs any more what free blocks held before."""
        num_layers = runner.config.num_layers
        first = (num_layers - num_layers // 3) // 2
        self._forward = runner.without(range(first, first + num_layers // 3))
        self._blocks = blocks
        self._block_size = runner.layout.block_size
        self._max_tokens = runner.max_tokens
        self._before_writing = before_writing
        self._drawn = DrawnTokens()

    def num_behind(self, sequence: Sequence) -> int | None:
        """Its last token, if nothing else is missing."""
        return 1 if sequence.num_missing == 1 and len(sequence.tokens) < self._max_tokens else None

    def catch_up(self, sequence: Sequence, num_tokens: int) -> None:
        pass

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        drafting = [
            _Drafting(one, beyond) for one in sequences if (beyond := self._beyond(one, max_tokens)) is not None
        ]
        self._before_writing()
        going_on = drafting
        for place in range(max_tokens):
            if not going_on:
                break
            logits = self._forward(Batch.of([one.row() for one in going_on], block_size=self._block_size))
            drawn = self._drawn.draw(logits, [one.sequence for one in going_on], place)
            for one, token in zip(going_on, drawn, strict=True):
                one.draft.take(token)
            going_on = [one for one in going_on if not one.draft.is_over]
        for one in drafting:
            self._blocks.free(one.beyond)
        found = {one.sequence: one.draft.proposal() for one in drafting}
        return [found.get(sequence, NOTHING) for sequence in sequences]

    def finished(self, sequence: Sequence) -> None:
        pass

    def rest(self, num_first: int | None) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass

    def _beyond(self, sequence: Sequence, max_tokens: int) -> list[int] | None:
        """Blocks for what is computed behind the sequence's own; None: there is no room."""
        num_tokens = len(sequence.tokens) + max_tokens - 1
        if num_tokens > self._max_tokens:
            return None
        beyond: list[int] = []
        missing = sequence.num_blocks_for(num_tokens) - len(sequence.blocks)
        return beyond if self._blocks.extend(beyond, max(0, missing)) else None


class _Drafting:
    """A row of an ask."""

    def __init__(self, sequence: Sequence, beyond: list[int]) -> None:
        self.sequence = sequence
        self.beyond = beyond
        self.draft = DrawnDraft()
        self._blocks = [*sequence.blocks, *beyond]

    def row(self) -> Row:
        """The token that nobody has computed yet."""
        start = len(self.sequence.tokens) - 1 + len(self.draft.tokens)
        return Row([(self.draft.tokens or self.sequence.tokens)[-1]], start, self._blocks, num_logits=1)
