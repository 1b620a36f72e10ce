"""Local decodes: answers that a prefill replica finishes itself while no decode replica has room for them.

They get a share of its rows and blocks, so that prompts continue beside them. A prompt larger than the remaining blocks
preempts them.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.kv.block_manager import BlockManager
from engine.scheduler.decoding import Decoding
from engine.scheduler.prompts import Prompt, PromptQueue
from engine.scheduler.sequence import Sequence


class LocalDecodes:
    """Share of the local decodes, and their preemption. Owned by the step thread."""

    def __init__(
        self, blocks: BlockManager, prompts: PromptQueue, decoding: Decoding, *, max_choices: int, max_blocks: int
    ) -> None:
        self._blocks = blocks
        self._prompts = prompts
        self._decoding = decoding
        self._max_choices = max_choices
        self._max_blocks = max_blocks

    @property
    def num_choices(self) -> int:
        """Choices that decode, or will as soon as their prompt is computed."""
        return len(self._decoding.running) + sum(len(prompt.choices) for prompt in self._admitted())

    @property
    def num_waiting(self) -> int:
        """Choices without blocks."""
        waiting = sum(len(prompt.choices) for prompt in self._prompts.waiting if prompt.is_local_decode)
        return waiting + len(self._decoding.preempted)

    @property
    def num_blocks(self) -> int:
        """Blocks held; a shared block counts once per sequence."""
        sequences = (*self._decoding.running, *(prompt.sequence for prompt in self._admitted()))
        return sum(len(sequence.blocks) for sequence in sequences)

    def may_ever_fit(self, prompt: Prompt) -> bool:
        return len(prompt.choices) <= self._max_choices and _blocks_to_resume(prompt.sequence) <= self._max_blocks

    def has_room(self, prompt: Prompt) -> bool:
        """Return True if the prompt fits into the share. Preempted sequences come before it."""
        if self._decoding.preempted or self.num_choices + len(prompt.choices) > self._max_choices:
            return False
        return self.num_blocks + _blocks_to_resume(prompt.sequence) <= self._max_blocks

    def may_resume(self, sequence: Sequence) -> bool:
        """Return True if a preempted sequence may get blocks again.

        A single sequence may exceed the share as long as no prompt needs the blocks beyond it.
        """
        num_choices, num_blocks = self.num_choices, self.num_blocks + _blocks_to_resume(sequence)
        if self._first_that_cannot_fit(num_blocks):
            return False
        return not num_choices or (num_blocks <= self._max_blocks and num_choices < self._max_choices)

    def preempt_for(self) -> None:
        """Preempt local decodes for the first waiting prompt if it could never fit beside their share.

        A sequence that exceeds the share counts with its own size. Called before the rows of a step are chosen.
        """
        if not self._decoding.running or not (prompt := self._first_that_cannot_fit(self.num_blocks)):
            return
        sequence, num_tokens = prompt.sequence, len(prompt.sequence.tokens)
        reusable = sequence.hashes()[: sequence.num_reusable(num_tokens) // sequence.block_size]
        missing = self._blocks.num_needed(reusable, sequence.num_blocks_for(num_tokens)) - self._blocks.num_available
        if missing > 0:
            self._decoding.preempt_for(missing)

    def _first_that_cannot_fit(self, num_blocks: int) -> Prompt | None:
        """Return the first waiting prompt if it does not fit beside the larger of the share and `num_blocks` blocks."""
        first = next((prompt for prompt in self._prompts.waiting if not prompt.is_local_decode), None)
        left = self._blocks.num_blocks - max(self._max_blocks, num_blocks)
        return first if first and first.sequence.num_blocks_for(len(first.sequence.tokens)) > left else None

    def _admitted(self) -> Iterator[Prompt]:
        return (prompt for prompt in (*self._prompts.computing, *self._prompts.fetching) if prompt.is_local_decode)


def _blocks_to_resume(sequence: Sequence) -> int:
    """Return the blocks needed to resume: for one token more than there are."""
    return sequence.num_blocks_for(len(sequence.tokens) + 1)
