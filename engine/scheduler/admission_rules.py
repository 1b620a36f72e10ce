"""Admission policies: when a waiting prompt gets its blocks, on engines that decode and on those that only prefill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from core.types.request import OFFLINE
from engine.kv.block_manager import BlockManager
from engine.scheduler.decoding import Decoding
from engine.scheduler.local_decode import LocalDecodes
from engine.scheduler.prompts import Prompt, PromptQueue, has_parts, num_needed, num_parts
from engine.scheduler.sequence import Sequence


class AdmissionPolicy(Protocol):
    """Rule for when waiting prompts get blocks. The engine calls `ahead`, then `admit_on_demand`, once in each step."""

    @property
    def num_running(self) -> int:
        """Sequences that run, or will run as soon as their KV is in the pool; limited by max_running."""
        ...

    def ahead(self) -> list[Prompt]:
        """Admit prompts before the rows are chosen, even without budget for them. Return the admitted ones."""
        ...

    def admit_on_demand(self) -> Iterator[Prompt]:
        """Yield prompts while the step has budget for another chunk; each is admitted when it is yielded."""
        ...

    def may_resume(self, sequence: Sequence) -> bool:
        """Return True if a preempted sequence may get blocks again, provided there are any."""
        ...


class AdmitWithRoomToGrow:
    """Policy that admits every prompt that fits, because other replicas may be waiting to fill its blocks.

    Each decoding sequence keeps one free block to grow into. Preempted sequences come before new prompts, except those
    of a tenant that, with the prompt, holds no more blocks than any preempted or blocked tenant. To admit such a
    prompt, the tenant holding most is preempted.
    """

    def __init__(self, blocks: BlockManager, prompts: PromptQueue, decoding: Decoding, *, max_running: int) -> None:
        self._blocks = blocks
        self._prompts = prompts
        self._decoding = decoding
        self._max_running = max_running

    @property
    def num_running(self) -> int:
        prompts = self._prompts
        pending = (*prompts.reserved, *prompts.fetching, *prompts.computing)
        return len(self._decoding.running) + sum(len(prompt.choices) for prompt in pending)

    def ahead(self) -> list[Prompt]:
        admitted = []
        blocked = {sequence.request.tenant for sequence in self._decoding.preempted}
        for prompt in tuple(self._prompts.waiting):
            tenant, num_blocks = _demand(prompt)
            if tenant in blocked:
                continue
            if blocked and (_is_offline(prompt) or not self._decoding.is_poorer(tenant, num_blocks, than=blocked)):
                blocked.add(tenant)
                continue
            if not prompt.is_received and self._prompts.is_in_flight_elsewhere(prompt):
                continue
            if self._has_room(prompt) and self._prompts.admit(prompt):
                admitted.append(prompt)
            else:
                blocked.add(tenant)
        return admitted

    def admit_on_demand(self) -> Iterator[Prompt]:
        return iter(())

    def may_resume(self, sequence: Sequence) -> bool:
        return self.num_running < self._max_running

    def _has_room(self, prompt: Prompt) -> bool:
        num_choices = len(prompt.choices)
        if self.num_running + num_choices > max(self._max_running, num_choices):
            return False
        if not self.num_running:
            return True
        windows, tenant, num_blocks = self._blocks.windows, *_demand(prompt)
        parts_missing = num_parts(prompt.sequence, windows, prompt.room) - windows.num_unreserved if windows else 0
        missing = (
            num_needed(prompt, self._blocks, num_blocks) + len(self._decoding.running) - self._blocks.num_available
        )
        if missing <= 0 and parts_missing <= 0:
            return True
        return not _is_offline(prompt) and self._decoding.preempt_for_tenant(
            tenant, num_blocks, num_missing=missing, parts_missing=parts_missing
        )


def _demand(prompt: Prompt) -> tuple[str, int]:
    """Return the tenant and the number of blocks that the prompt starts with."""
    sequence = prompt.sequence
    return sequence.request.tenant, sequence.num_blocks_for(len(sequence.tokens) + max(1, prompt.room))


def _is_offline(prompt: Prompt) -> bool:
    return prompt.sequence.request.priority >= OFFLINE


class AdmitOnDemand:
    """Policy that admits a prompt when the step has budget for a chunk of it.

    A prompt with a prefix to fetch is admitted earlier, if there is room for it and for all prompts before it. Local
    decodes without room are skipped.
    """

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
        self._local_decodes.preempt_for()
        prompts, begun = self._prompts, []
        num_ahead = parts_ahead = 0  # upper bounds of the blocks and parts that earlier prompts need
        windows = self._blocks.windows
        for prompt in tuple(prompts.waiting):
            if self.num_running >= self._max_running:
                break
            if prompt.is_local_decode and not self._local_decodes.has_room(prompt):
                continue
            needed = prompt.sequence.num_blocks_for(len(prompt.sequence.tokens))
            if not prompts.has_offer(prompt) or prompts.is_in_flight_elsewhere(prompt):
                num_ahead += needed
                parts_ahead += windows.num_for(prompt.sequence.ends_at) if windows else 0
            elif windows and parts_ahead and not has_parts(prompt.sequence, windows, beside=parts_ahead):
                break
            elif (num_ahead and num_ahead + needed > self._blocks.num_available) or not prompts.admit(prompt):
                break
            else:
                begun.append(prompt)
        return begun

    def admit_on_demand(self) -> Iterator[Prompt]:
        prompts = self._prompts
        for prompt in tuple(prompts.waiting):
            if self.num_running >= self._max_running:
                return
            if prompts.is_in_flight_elsewhere(prompt) or (
                prompt.is_local_decode and not self._local_decodes.has_room(prompt)
            ):
                continue
            if prompts.has_offer(prompt) or not prompts.admit(prompt):
                return
            yield prompt

    def may_resume(self, sequence: Sequence) -> bool:
        return self.num_running < self._max_running and self._local_decodes.may_resume(sequence)
