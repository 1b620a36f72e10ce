"""When a prompt that waits gets its blocks: one rule for engines that decode, one for those that only prefill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from core.types.request import OFFLINE
from engine.kv.block_manager import BlockManager
from engine.scheduler.decoding import Decoding
from engine.scheduler.local_decode import LocalDecodes
from engine.scheduler.prompts import Prompt, PromptQueue
from engine.scheduler.sequence import Sequence


class Admission(Protocol):
    """Asked twice in each step."""

    @property
    def num_running(self) -> int:
        """Sequences that run, or will as soon as their KV is there: what max_running limits."""
        ...

    def ahead(self) -> list[Prompt]:
        """Before the rows are chosen: those that are admitted now, whether or not there is a chunk for them yet."""
        ...

    def in_time(self) -> Iterator[Prompt]:
        """While the step has room for another chunk: each prompt is admitted as it is asked for."""
        ...

    def may_go_on(self, sequence: Sequence) -> bool:
        """Whether one that was preempted may have blocks again, if there are any."""
        ...


class AdmitWithRoomToGrow:
    """Whoever fits gets blocks at once, for others may be waiting to fill them, as long as each sequence that decodes
    is left one to grow into. Those that were preempted come before all, but for prompts of tenants who have less than
    theirs; for these, sequences of whoever has more are preempted."""

    def __init__(self, blocks: BlockManager, prompts: PromptQueue, decoding: Decoding, *, max_running: int) -> None:
        self._blocks = blocks
        self._prompts = prompts
        self._decoding = decoding
        self._max_running = max_running

    @property
    def num_running(self) -> int:
        prompts = self._prompts
        to_come = (*prompts.reserved, *prompts.fetching, *prompts.computing)
        return len(self._decoding.running) + sum(len(prompt.choices) for prompt in to_come)

    def ahead(self) -> list[Prompt]:
        admitted = []
        held_up = {sequence.request.tenant for sequence in self._decoding.preempted}
        for prompt in tuple(self._prompts.waiting):
            tenant, num_blocks = _wanted(prompt)
            if tenant in held_up:
                continue
            if held_up and (_is_offline(prompt) or not self._decoding.is_poorer(tenant, num_blocks, than=held_up)):
                held_up.add(tenant)
                continue
            if not prompt.is_received and self._prompts.is_on_its_way(prompt):
                continue  # others go on meanwhile
            if self._has_room(prompt) and self._prompts.admit(prompt):
                admitted.append(prompt)
            else:
                held_up.add(tenant)
        return admitted

    def in_time(self) -> Iterator[Prompt]:
        return iter(())

    def may_go_on(self, sequence: Sequence) -> bool:
        return self.num_running < self._max_running

    def _has_room(self, prompt: Prompt) -> bool:
        sequence, num_choices = prompt.sequence, len(prompt.choices)
        if self.num_running + num_choices > max(self._max_running, num_choices):
            return False
        if not self.num_running:
            return True
        tenant, num_blocks = _wanted(prompt)
        needed = self._blocks.num_needed([] if sequence.is_scored else sequence.hashes(), num_blocks)
        missing = needed + len(self._decoding.running) - self._blocks.num_available
        if missing <= 0:
            return True
        return not _is_offline(prompt) and self._decoding.make_way(tenant, num_blocks, num_missing=missing)


def _wanted(prompt: Prompt) -> tuple[str, int]:
    """By whom, and how many blocks to begin with."""
    sequence = prompt.sequence
    return sequence.request.tenant, sequence.num_blocks_for(len(sequence.tokens) + max(1, prompt.room))


def _is_offline(prompt: Prompt) -> bool:
    return prompt.sequence.request.priority >= OFFLINE


class AdmitInTime:
    """A prompt gets blocks when there is a chunk for it to compute; or before, when a part of it is fetched meanwhile
    and there is room for it and for all who came before. Guests that have no room yet are passed by."""

    def __init__(
        self, blocks: BlockManager, prompts: PromptQueue, local_decodes: LocalDecodes, *, max_running: int
    ) -> None:
        self._blocks = blocks
        self._prompts = prompts
        self._local_decodes = local_decodes
        self._max_running = max_running

    @property
    def num_running(self) -> int:
        to_ship = (
            prompt for prompt in (*self._prompts.computing, *self._prompts.fetching) if not prompt.is_local_decode
        )
        return sum(1 for _ in to_ship) + self._local_decodes.num_choices

    def ahead(self) -> list[Prompt]:
        self._local_decodes.give_way()
        prompts, begun = self._prompts, []
        num_ahead = 0  # blocks for those who came before, at most
        for prompt in tuple(prompts.waiting):
            if self.num_running >= self._max_running:
                break
            if prompt.is_local_decode and not self._local_decodes.has_room(prompt):
                continue
            needed = prompt.sequence.num_blocks_for(len(prompt.sequence.tokens))
            if not prompts.check_offer(prompt) or prompts.is_on_its_way(prompt):
                num_ahead += needed
            elif (num_ahead and num_ahead + needed > self._blocks.num_available) or not prompts.admit(prompt):
                break
            else:
                begun.append(prompt)
        return begun

    def in_time(self) -> Iterator[Prompt]:
        prompts = self._prompts
        for prompt in tuple(prompts.waiting):
            if self.num_running >= self._max_running:
                return
            if prompts.is_on_its_way(prompt) or (prompt.is_local_decode and not self._local_decodes.has_room(prompt)):
                continue  # others go on meanwhile
            if prompts.check_offer(prompt) or not prompts.admit(prompt):
                return  # there was no room
            yield prompt

    def may_go_on(self, sequence: Sequence) -> bool:
        return self.num_running < self._max_running and self._local_decodes.may_go_on(sequence)
