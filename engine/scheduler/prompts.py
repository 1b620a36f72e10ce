"""Prompts on their way into an engine: those that wait, whose KV comes from elsewhere, that are being computed."""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from core.types.errors import CapacityError, ContextLengthExceeded
from core.types.prompt_logprobs import PromptLogprobs
from core.types.step_timing import PromptSpent
from engine.kv.block_manager import BlockManager
from engine.scheduler.sequence import Sequence

# The life of a prompt:
#
#     waiting ──blocks──────────────────────────────> computing ──whole──> gone
#        ^ ├───blocks, and somebody holds more──> fetching ──fetched──^     ^
#        │ │                                         │                      │
#        └─┼──────────── fetch_failed ───────────────┘                      │
#          └───blocks, and others compute it──> reserved ──landed───────────┘
#
# One that only fetches is gone as soon as there is nothing more to fetch: see take_fetched.

ROOM_TOKENS = 64  # so far may a sequence grow while its KV is shipped to us; then it must pause


class KVSource(StrEnum):
    """Where the KV of a prompt comes from."""

    HERE = "here"  # this replica: it is computed, but for a prefix that may be fetched
    PREFILL = "prefill"  # a prefill replica computes it and ships it
    DECODE = "decode"  # another decode replica runs the sequence, and ships what it has


@dataclass(eq=False)
class Prompt:
    """What a request brings to an engine: its tokens so far. All its choices go on from there, and share the blocks."""

    sequence: Sequence  # holds the blocks
    source: KVSource = KVSource.HERE
    fetch_only: bool = False  # its prefix is brought here, and nothing is computed
    is_local_decode: bool = False  # of an engine that does not decode: this one is answered here all the same
    is_restart: bool = False  # of one sequence that was preempted
    num_offered: int = 0  # leading tokens that a peer, or a tier below this pool, is said to hold; 0: not counted on
    num_matched: int = 0  # leading tokens that were in the prefix cache when it was queued
    num_cached: int = 0  # tokens found in the prefix cache when it was admitted
    num_fetched: int = 0  # tokens after these whose KV came from where it was offered
    num_loaded: int = 0  # of these, those that were here in a lower tier
    number: int = 0  # of its arrival
    spent: PromptSpent | None = None  # where its time went so far, as whoever serves it has seen
    scores: list[PromptLogprobs | None] = field(default_factory=list)  # of its chunks; None: the logits were not finite

    @property
    def id(self) -> str:
        return self.sequence.request.id

    @property
    def choices(self) -> tuple[int, ...]:
        """Those of the request that go on from here."""
        return (self.sequence.choice,) if self.is_restart else self.sequence.request.choices

    @property
    def num_found(self) -> int:
        """Tokens whose KV was here before, on the device or in a lower tier."""
        return self.num_cached + self.num_loaded

    @property
    def num_from_peers(self) -> int:
        """Tokens whose KV a peer has shipped."""
        return self.num_fetched - self.num_loaded

    @property
    def fetch_end(self) -> int:
        """Positions before this one are to be fetched, where they are not here."""
        return self.sequence.num_reusable(self.num_offered)

    def take_scores(self) -> PromptLogprobs:
        """Of all its tokens but the first, where it was asked for: else of none. They are not kept here."""
        scores, self.scores = self.scores, []
        told = [one for one in scores if one is not None]
        return PromptLogprobs.joined(told, num_top=told[0].num_top if told else 0)

    @property
    def is_received(self) -> bool:
        """Another replica ships all that is not in our cache: nothing is computed or fetched here."""
        return self.source is not KVSource.HERE

    @property
    def is_running_elsewhere(self) -> bool:
        return self.source is KVSource.DECODE

    @property
    def num_expected(self) -> int:
        """Tokens that will be computed, if what is here stays and what is offered comes."""
        held = max(self.sequence.num_computed, self.sequence.num_reusable(max(self.num_matched, self.num_offered)))
        return len(self.sequence.tokens) - held if not (self.is_received or self.fetch_only) else 0

    @property
    def room(self) -> int:
        """How many tokens more than are known may come along with its KV."""
        if self.source is not KVSource.DECODE:
            return 0
        return min(ROOM_TOKENS, self.sequence.max_context - len(self.sequence.tokens))


class PromptQueue:
    """Owned by the step thread.

    A prompt has all its blocks from its admission on, so that it can always run to its end. Smaller priorities go
    first, from the next chunk on; within one, the order of arrival holds, however long a prefix was on its way.
    """

    def __init__(self, blocks: BlockManager, *, max_waiting: int) -> None:
        self.waiting: list[Prompt] = []  # this, those that are fetched and those that are computed are sorted
        self.fetching: list[Prompt] = []
        self.computing: list[Prompt] = []
        self.reserved: dict[Prompt, None] = {}
        self._blocks = blocks
        self._max_waiting = max_waiting
        self._numbers = itertools.count()

    @property
    def num_queued_tokens(self) -> int:
        """Tokens still to be computed here."""
        return sum(prompt.num_expected for prompt in (*self.waiting, *self.fetching, *self.computing))

    def add(self, prompt: Prompt) -> None:
        """Raises CapacityError when the queue is full, ContextLengthExceeded when the prompt can never fit."""
        sequence = prompt.sequence
        if sequence.num_blocks_for(len(sequence.tokens)) > self._blocks.num_blocks:
            room = self._blocks.num_blocks * sequence.block_size
            raise ContextLengthExceeded(
                f"{len(sequence.tokens)} tokens do not fit into a pool of {room}", param="prompt"
            )
        if len(self.waiting) >= self._max_waiting:
            raise CapacityError(f"{len(self.waiting)} prompts are waiting already")
        prompt.number = next(self._numbers)
        prompt.num_matched = self._blocks.match(sequence.hashes()) * sequence.block_size
        insort(self.waiting, prompt, key=_turn)

    def restart(self, sequence: Sequence) -> None:
        """A sequence that was preempted has blocks again, and is computed once more."""
        prompt = Prompt(sequence, is_local_decode=True, is_restart=True, number=next(self._numbers))
        insort(self.computing, prompt, key=_turn)

    def remove(self, prompt: Prompt) -> None:
        """Take a prompt out, wherever it is; its blocks stay with the caller."""
        self.reserved.pop(prompt, None)
        for place in (self.waiting, self.fetching, self.computing):
            if prompt in place:
                place.remove(prompt)

    def remove_restart(self, sequence: Sequence) -> None:
        self.computing = [p for p in self.computing if not (p.is_restart and p.sequence is sequence)]

    def admit(self, prompt: Prompt) -> bool:
        """Give a prompt that waits its blocks; False if there is no room. Then it is computed, fetched or reserved."""
        sequence = prompt.sequence
        if not allocate(sequence, self._blocks, reuse_all=prompt.source is KVSource.PREFILL, room=prompt.room):
            return False
        prompt.num_matched, prompt.num_cached = 0, sequence.num_computed  # known from now on
        self.waiting.remove(prompt)
        if prompt.is_received:
            self.reserved[prompt] = None
        else:
            insort(self.fetching if prompt.fetch_end > prompt.num_cached else self.computing, prompt, key=_turn)
        return True

    def fetched(self, prompt: Prompt, num_tokens: int) -> None:
        """The KV of the next `num_tokens` positions is in the prompt's blocks: what is missing yet is computed."""
        self.fetching.remove(prompt)
        prompt.num_offered, prompt.num_fetched = 0, num_tokens
        prompt.sequence.computed(num_tokens, self._blocks)
        insort(self.computing, prompt, key=_turn)

    def fetch_failed(self, prompt: Prompt) -> None:
        """What was offered does not come: the prompt gives its blocks back, and waits again.

        A block that something may still be written to is the caller's, who has taken it out of the table.
        """
        self.fetching.remove(prompt)
        prompt.num_offered = 0
        prompt.sequence.release(self._blocks)
        insort(self.waiting, prompt, key=_turn)

    def take_fetched(self) -> list[Prompt]:
        """Those that only fetch, and have got what there is. They are gone from here; their blocks are the caller's."""
        over = [prompt for prompt in self.computing if prompt.fetch_only]
        over += [prompt for prompt in self.waiting if prompt.fetch_only and not self.check_offer(prompt)]
        for prompt in over:
            self.remove(prompt)
        return over

    def is_on_its_way(self, prompt: Prompt) -> bool:
        """Another prompt's computation, or a fetch, brings the very block that this one lacks first: it waits."""
        others = [other.sequence for other in (*self.computing, *self.fetching)]
        return prompt.sequence.is_behind(others, self._blocks)

    def check_offer(self, prompt: Prompt) -> bool:
        """Whether more is offered than is here. Once it is not, the offer is forgotten: nothing is fetched behind a
        gap."""
        sequence = prompt.sequence
        if prompt.num_offered and self._blocks.match(sequence.hashes()) * sequence.block_size >= prompt.fetch_end:
            prompt.num_offered = 0
        return prompt.num_offered > 0

    def chunks(self, budget: int, more: Iterable[Prompt]) -> list[tuple[Prompt, int]]:
        """Up to `budget` tokens of those that are computed, then of `more`, which is asked only while there is room."""
        chosen: list[tuple[Prompt, int]] = []
        for prompt in itertools.chain(tuple(self.computing), more) if budget > 0 else ():
            num_tokens = min(budget, prompt.sequence.num_missing)
            chosen.append((prompt, num_tokens))
            budget -= num_tokens
            if not budget:
                break
        return chosen


def allocate(sequence: Sequence, blocks: BlockManager, *, reuse_all: bool = False, room: int = 0) -> bool:
    """Give a sequence the blocks of all its tokens, and of `room` more. False, taking nothing, if there is no room.

    Where it is computed here, at least its last token is, for its logits are wanted; and what is shipped while it
    decodes lacks the last too.
    """
    num_tokens = len(sequence.tokens)
    num_reusable = num_tokens if reuse_all else sequence.num_reusable(num_tokens)
    reusable = sequence.hashes()[: num_reusable // sequence.block_size]
    taken = blocks.allocate(reusable, sequence.num_blocks_for(num_tokens + room))
    if taken is None:
        return False
    sequence.start_with(*taken)
    return True


def _turn(prompt: Prompt) -> tuple[int, int]:
    return prompt.sequence.request.priority, prompt.number
