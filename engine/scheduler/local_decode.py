"""Local decodes: answers that a prefill replica finishes itself while no decode replica has room for them.

They get only a share of its rows and blocks, so that prompts continue to be computed. A prompt larger than the
remaining blocks preempts them.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.model.kv_memory import most_parts
from engine.kv.block_manager import BlockManager
from engine.scheduler.decoding import Decoding
from engine.scheduler.prompts import Prompt, PromptQueue, num_needed
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
        if self.num_choices and not self._leaves_parts(prompt.sequence, num_choices=len(prompt.choices)):
            return False
        return self.num_blocks + _blocks_to_resume(prompt.sequence) <= self._max_blocks

    def may_resume(self, sequence: Sequence) -> bool:
        """Return True if a preempted sequence may get blocks again.

        A single sequence may exceed the share as long as no prompt needs the blocks beyond it.
        """
        num_choices, num_blocks = self.num_choices, self.num_blocks + _blocks_to_resume(sequence)
        if self._first_that_cannot_fit(num_blocks) or self._parts_missing(sequence) > 0:
            return False
        if not num_choices:
            return True
        is_within = num_blocks <= self._max_blocks and num_choices < self._max_choices
        return is_within and self._leaves_parts(sequence)

    def preempt_for(self) -> None:
        """Preempt local decodes for the first waiting prompt if their share, or their parts, leave no room for it.

        A sequence that exceeds the share counts with its own size. Called before the rows of a step are chosen.
        """
        if not self._decoding.running:
            return
        self._decoding.preempt_for_parts(self._parts_missing())
        if not (prompt := self._first_that_cannot_fit(self.num_blocks)):
            return
        num_blocks = prompt.sequence.num_blocks_for(len(prompt.sequence.tokens))
        missing = num_needed(prompt, self._blocks, num_blocks) - self._blocks.num_available
        if missing > 0:
            self._decoding.preempt_for(missing)

    def _first_that_cannot_fit(self, num_blocks: int) -> Prompt | None:
        """Return the first waiting prompt if the share, or `num_blocks` if larger, leaves it too few blocks."""
        first = self._first_to_ship()
        left = self._blocks.num_blocks - max(self._max_blocks, num_blocks)
        return first if first and first.sequence.num_blocks_for(len(first.sequence.tokens)) > left else None

    def _first_to_ship(self) -> Prompt | None:
        return next((prompt for prompt in self._prompts.waiting if not prompt.is_local_decode), None)

    def _parts_missing(self, *more: Sequence) -> int:
        """Return how many parts the first waiting prompt lacks while the local decodes run, `more` included."""
        windows = self._blocks.windows
        if windows is None or not (first := self._first_to_ship()):
            return 0
        num_held = sum(sequence.parts.reserved for sequence in self._decoding.running)
        num_held += sum(windows.num_for(sequence.ends_at) for sequence in more)
        return windows.num_for(first.sequence.ends_at) + num_held - windows.num_reservable

    def _leaves_parts(self, sequence: Sequence, *, num_choices: int = 1) -> bool:
        """Return True if a prompt can reserve its parts in addition to the choices', or if no layer frees KV."""
        if (windows := self._blocks.windows) is None:
            return True
        num_of_prompt = most_parts(windows.window, windows.block_size)
        return windows.num_unreserved >= num_choices * windows.num_for(sequence.ends_at) + num_of_prompt

    def _admitted(self) -> Iterator[Prompt]:
        return (prompt for prompt in (*self._prompts.computing, *self._prompts.fetching) if prompt.is_local_decode)


def _blocks_to_resume(sequence: Sequence) -> int:
    """Return the number of blocks that a preempted sequence needs: for all its tokens and one more."""
    return sequence.num_blocks_for(len(sequence.tokens) + 1)
