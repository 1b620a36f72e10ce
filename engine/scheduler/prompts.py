"""Prompt queue of an engine: waiting, fetching, reserved and computing prompts."""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from core.types.errors import CapacityError, ContextLengthExceeded
from core.types.handoff import ROOM_TOKENS
from core.types.prompt_logprobs import PromptLogprobs
from core.types.step_timing import PromptSpent, PromptTimes
from engine.kv.block_manager import BlockManager
from engine.kv.window_manager import WindowManager
from engine.scheduler.sequence import Sequence

# States of a prompt:
#
#     waiting ──blocks──────────────────────────────> computing ──whole──> gone
#        ^ ├───blocks, and a source holds more──> fetching ──fetched──^     ^
#        │ │                                         │                      │
#        └─┼──────────── fetch_failed ───────────────┘                      │
#          └───blocks, and another computes it──> reserved ──landed─────────┘
#
# A fetch-only prompt leaves as soon as there is nothing more to fetch: see take_fetched.


class KVSource(StrEnum):
    """Source of a prompt's KV."""

    HERE = "here"  # computed by this replica, except for a prefix that may be fetched
    PREFILL = "prefill"  # computed and shipped by a prefill replica
    DECODE = "decode"  # shipped by another decode replica that runs the sequence


@dataclass(eq=False)
class Prompt:
    """Tokens of a request when it enters the engine. All its choices continue from them and share the blocks."""

    sequence: Sequence  # holds the blocks
    source: KVSource = KVSource.HERE
    fetch_only: bool = False  # fetch the prefix and compute nothing
    is_local_decode: bool = False  # decoded here although the engine does not decode
    is_restart: bool = False  # recomputes one preempted sequence
    num_offered: int = 0  # leading tokens that a peer or a lower tier reportedly holds; 0: ignore
    is_loaded: bool = False  # the offer is from a lower tier
    num_matched: int = 0  # leading tokens in the prefix cache when the prompt was queued
    num_cached: int = 0  # leading tokens in the prefix cache when the prompt was admitted
    num_fetched: int = 0  # tokens after num_cached whose KV was fetched
    num_loaded: int = 0  # the part of num_fetched that came from a lower tier of this replica
    number: int = 0  # arrival number
    times: PromptTimes = field(default_factory=PromptTimes)
    spent: PromptSpent | None = None  # time spent so far, measured by the worker
    # Per chunk; None if the logits were not finite.
    scores: list[PromptLogprobs | None] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.sequence.request.id

    @property
    def choices(self) -> tuple[int, ...]:
        """Choices of the request that continue from this prompt."""
        return (self.sequence.choice,) if self.is_restart else self.sequence.request.choices

    @property
    def num_found(self) -> int:
        """Tokens whose KV was on this replica before, on the device or in a lower tier."""
        return self.num_cached + self.num_loaded

    @property
    def num_from_peers(self) -> int:
        """Tokens whose KV a peer shipped."""
        return self.num_fetched - self.num_loaded

    @property
    def fetch_end(self) -> int:
        """End of the positions that a fetch would bring."""
        return self.sequence.num_reusable(self.num_offered)

    def take_scores(self) -> PromptLogprobs:
        """Return the scores of all tokens but the first, empty if none were requested, and forget them."""
        scores, self.scores = self.scores, []
        finite = [one for one in scores if one is not None]
        return PromptLogprobs.joined(finite, num_top=finite[0].num_top if finite else 0)

    @property
    def is_received(self) -> bool:
        """True if another replica ships all KV that is not cached: this engine computes and fetches nothing."""
        return self.source is not KVSource.HERE

    @property
    def is_running_elsewhere(self) -> bool:
        return self.source is KVSource.DECODE

    @property
    def num_expected(self) -> int:
        """Tokens to compute, provided that cached blocks stay and offered ones arrive."""
        held = max(self.sequence.num_computed, self.sequence.num_reusable(max(self.num_matched, self.num_offered)))
        return len(self.sequence.tokens) - held if not (self.is_received or self.fetch_only) else 0

    @property
    def room(self) -> int:
        """Maximum number of further tokens that may arrive with the prompt's KV."""
        if self.source is not KVSource.DECODE:
            return 0
        return min(ROOM_TOKENS, self.sequence.max_context - len(self.sequence.tokens))


class PromptQueue:
    """Prompts by state. Owned by the step thread.

    A prompt gets all its blocks on admission, so it can always complete. Smaller priorities go first and overtake
    between chunks. Within a priority the order of arrival holds, however long a fetch took.
    """

    def __init__(self, blocks: BlockManager, *, max_waiting: int) -> None:
        self.waiting: list[Prompt] = []  # waiting, fetching and computing are sorted by `_turn`
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
        """Queue a prompt. Raises CapacityError if the queue is full, ContextLengthExceeded if the prompt cannot fit."""
        sequence = prompt.sequence
        if sequence.num_blocks_for(len(sequence.tokens)) > self._blocks.num_blocks:
            room = self._blocks.num_blocks * sequence.block_size
            raise ContextLengthExceeded(
                f"{len(sequence.tokens)} tokens do not fit into a KV pool of {room}", param="prompt"
            )
        if len(self.waiting) >= self._max_waiting:
            raise CapacityError(
                f"prompt queue full: {len(self.waiting)} prompts are waiting (limit {self._max_waiting})"
            )
        prompt.number = next(self._numbers)
        prompt.num_matched = self._blocks.match_reusable(sequence.hashes()) * sequence.block_size
        insort(self.waiting, prompt, key=_turn)

    def restart(self, sequence: Sequence) -> None:
        """Queue a preempted sequence that has blocks again, to recompute its KV."""
        prompt = Prompt(sequence, is_local_decode=True, is_restart=True, number=next(self._numbers))
        insort(self.computing, prompt, key=_turn)

    def remove(self, prompt: Prompt) -> None:
        """Remove a prompt from any state; its blocks stay with the caller."""
        self.reserved.pop(prompt, None)
        for place in (self.waiting, self.fetching, self.computing):
            if prompt in place:
                place.remove(prompt)

    def remove_restart(self, sequence: Sequence) -> None:
        self.computing = [p for p in self.computing if not (p.is_restart and p.sequence is sequence)]

    def admit(self, prompt: Prompt) -> bool:
        """Allocate the blocks of a waiting prompt. Returns False if there is no room.

        The prompt is then computing, fetching or reserved.
        """
        sequence, windows = prompt.sequence, self._blocks.windows
        loads_checkpoints = prompt.is_loaded and (self._blocks.states is not None or windows is not None)
        load_end = prompt.fetch_end if loads_checkpoints and self.has_offer(prompt) else 0
        if not allocate(sequence, self._blocks, source=prompt.source, room=prompt.room, load_end=load_end):
            return False
        prompt.num_matched, prompt.num_cached = 0, sequence.num_computed
        self.waiting.remove(prompt)
        if prompt.is_received:
            self.reserved[prompt] = None
        elif prompt.fetch_end > prompt.num_cached or load_end:
            if windows:
                # The fetch brings the parts that the first query after it sees.
                sequence.parts.advance(windows.first_seen(prompt.fetch_end), windows)
                sequence.parts.extend(sequence.blocks, prompt.fetch_end // sequence.block_size, windows)
            insort(self.fetching, prompt, key=_turn)
        else:
            insort(self.computing, prompt, key=_turn)
        return True

    def fetched(self, prompt: Prompt, num_tokens: int) -> None:
        """Record the KV of the next `num_tokens` positions as present, and compute the rest of the prompt."""
        self.fetching.remove(prompt)
        prompt.num_offered, prompt.num_fetched = 0, num_tokens
        prompt.sequence.computed(num_tokens, self._blocks)
        if self._blocks.states:
            prompt.sequence.checkpoint_fetched(self._blocks.states)
        insort(self.computing, prompt, key=_turn)

    def fetch_failed(self, prompt: Prompt) -> None:
        """Free the blocks of a prompt whose fetch failed, and let it wait again without the offer.

        The caller must have removed from its table the blocks that may still be written, and owns them.
        """
        self.fetching.remove(prompt)
        prompt.num_offered = 0
        prompt.sequence.release(self._blocks)
        insort(self.waiting, prompt, key=_turn)

    def take_fetched(self) -> list[Prompt]:
        """Remove and return the fetch-only prompts that have fetched all they can. Their blocks are the caller's."""
        finished = [prompt for prompt in self.computing if prompt.fetch_only]
        finished += [prompt for prompt in self.waiting if prompt.fetch_only and not self.has_offer(prompt)]
        for prompt in finished:
            self.remove(prompt)
        return finished

    def is_in_flight_elsewhere(self, prompt: Prompt) -> bool:
        """Return True if another prompt's computation or fetch brings the first block that this one lacks."""
        if self._blocks.windows and prompt.num_offered and (end := prompt.fetch_end):
            # `is_behind` looks for blocks, and a load may bring only parts of blocks that are here.
            last = end // prompt.sequence.block_size - 1
            same = (other.sequence.hashes()[last] for other in self.fetching if other.fetch_end == end)
            if prompt.sequence.hashes()[last] in same:
                return True
        others = [other.sequence for other in (*self.computing, *self.fetching)]
        return prompt.sequence.is_behind(others, self._blocks)

    def has_offer(self, prompt: Prompt) -> bool:
        """Return True if the offer exceeds the cached prefix. Otherwise drop the offer, which would bring nothing."""
        sequence, blocks = prompt.sequence, self._blocks
        if prompt.num_offered and blocks.match_reusable(sequence.hashes()) * sequence.block_size >= prompt.fetch_end:
            prompt.num_offered = 0
        return prompt.num_offered > 0

    def chunks(self, budget: int, more: Iterable[Prompt]) -> list[tuple[Prompt, int]]:
        """Return chunks of the computing prompts, then of `more`, up to `budget` tokens in total.

        Draws from `more` only with budget left.
        """
        chosen: list[tuple[Prompt, int]] = []
        for prompt in itertools.chain(tuple(self.computing), more) if budget > 0 else ():
            num_tokens = min(budget, prompt.sequence.num_missing)
            chosen.append((prompt, num_tokens))
            budget -= num_tokens
            if not budget:
                break
        return chosen


def allocate(
    sequence: Sequence,
    blocks: BlockManager,
    *,
    source: KVSource = KVSource.HERE,
    room: int = 0,
    load_end: int = 0,
) -> bool:
    """Allocate blocks for all tokens of a sequence and `room` more. Return False, taking nothing, without room.

    load_end: end of the prefix that will be loaded from a lower tier, with the checkpoints needed after it; 0: none.
    Cached blocks of that prefix are reused unless their part must be loaded.
    """
    states, num_blocks = blocks.states, sequence.num_blocks_for(len(sequence.tokens) + room)
    if states and not states.num_available:
        return False
    if blocks.windows and not has_parts(sequence, blocks.windows, room=room):
        return False
    reusable, to_load = _reusable(sequence, blocks, source), None
    needs_checkpoint = _needs_checkpoint(blocks, source)
    num_cached = blocks.match(_reusable_if_cached(sequence, blocks, source)) if needs_checkpoint else 0
    # A handoff or a load brings the state.
    checkpoint = reusable[-1] if reusable and needs_checkpoint and not load_end else None
    if load_end:
        reusable = sequence.hashes()[: load_end // sequence.block_size]
        to_load = blocks.places_without_part(reusable) if blocks.windows else None
    taken = blocks.allocate(reusable, num_blocks, to_load=to_load)
    if taken is None:
        return False
    sequence.start_with(*taken)
    if blocks.windows:
        _start_parts(sequence, blocks.windows, source, room=room)
    if states:
        sequence.start_state(states.take(checkpoint), states, num_cached=num_cached)
    return True


def has_parts(sequence: Sequence, windows: WindowManager, *, room: int = 0, beside: int = 0) -> bool:
    """Return True if a sequence can reserve its parts. room: as in `allocate`. beside: parts to leave for others."""
    return num_parts(sequence, windows, room) + beside <= windows.num_unreserved


def num_parts(sequence: Sequence, windows: WindowManager, room: int) -> int:
    """Return the parts that a sequence reserves, if `room` more tokens arrive with its KV."""
    return windows.num_for(sequence.ends_at) + sequence.num_blocks_for(room)


def _start_parts(sequence: Sequence, windows: WindowManager, source: KVSource, *, room: int) -> None:
    """Reserve a sequence's parts, hold those of its cached blocks, and attach those that another replica ships.

    The other replica ships the parts that this replica's first query sees; see CacheShape.window_start.
    """
    parts, table, num_cached = sequence.parts, sequence.blocks, sequence.num_computed // sequence.block_size
    parts.reserve(num_parts(sequence, windows, room), windows)
    if source is KVSource.HERE:
        parts.hold(table, windows.first_seen(sequence.num_computed), num_cached, windows)
        return
    num_shipped = len(sequence.tokens) - (source is KVSource.DECODE)
    first = windows.first_seen(num_shipped)
    parts.hold(table, first, max(first, num_cached), windows)
    parts.extend(table, len(table), windows)


def num_needed(prompt: Prompt, blocks: BlockManager, num_blocks: int) -> int:
    """Count the available blocks that a waiting prompt would take if it started with `num_blocks`."""
    return blocks.num_needed(_reusable(prompt.sequence, blocks, prompt.source), num_blocks)


def _reusable(sequence: Sequence, blocks: BlockManager, source: KVSource) -> list[bytes]:
    """Return the hashes of the leading blocks that need not be computed or shipped if they are cached."""
    hashes = _reusable_if_cached(sequence, blocks, source)
    # A handoff brings a state, but no parts of blocks that it does not ship.
    is_limited = blocks.windows is not None or _needs_checkpoint(blocks, source)
    return hashes[: blocks.match_reusable(hashes)] if is_limited else hashes


def _needs_checkpoint(blocks: BlockManager, source: KVSource) -> bool:
    """Return True if a prompt needs a state to continue from, because its last tokens are computed here."""
    return blocks.states is not None and source is KVSource.HERE


def _reusable_if_cached(sequence: Sequence, blocks: BlockManager, source: KVSource) -> list[bytes]:
    """Return the hashes of the leading blocks that a prompt may reuse, whether or not there are checkpoints.

    HERE, DECODE: all but the last token, whose logits are needed, or whose KV a decoding sequence does not have yet.
    PREFILL: all tokens, since a handoff may ship no position; but not with states, which come with at least one.
    """
    num_tokens = len(sequence.tokens)
    may_be_whole = source is KVSource.PREFILL and not blocks.states
    num_reusable = num_tokens if may_be_whole else sequence.num_reusable(num_tokens)
    return sequence.hashes()[: num_reusable // sequence.block_size]


def _turn(prompt: Prompt) -> tuple[int, int]:
    return prompt.sequence.request.priority, prompt.number
