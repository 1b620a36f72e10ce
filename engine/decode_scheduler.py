"""Which sequences take part in the next step: all that decode, and chunks of the prompts that are computed here."""

from __future__ import annotations

from bisect import insort
from collections import deque

from cluster.words.errors import CapacityError, ContextLengthExceeded
from engine.group import Choice, Group, Source
from engine.kv.block_manager import BlockManager
from engine.sequence import Sequence

# The life of a choice:
#
#   remote   waiting (group) ──blocks──> reserved (group) ──landed──> decoding <──> paused, to be moved
#   local    waiting (group) ──blocks──> prefilling ──────────────────> decoding
#               ^ │                       ^     ^                         │
#               │ └blocks─> fetching ─────┘     │ blocks                  │
#               └──failed──────┘                └── preempted <──no block left


ROOM_TOKENS = 64  # so far may a sequence grow while its KV is shipped to us; then it must pause


class Scheduler:
    """Continuous batching. Owned by the step thread.

    Decoding sequences grow block by block. When none is left, the youngest is preempted: it gives its blocks back and
    later computes its KV again (often from the cache, where its own blocks still lie). Those come before new requests.
    Of the prompts that are computed here, smaller priorities have the next chunk.
    """

    def __init__(self, blocks: BlockManager, *, max_batch_tokens: int, max_running: int, max_waiting: int) -> None:
        self.decoding: list[Choice] = []  # oldest first
        self.num_preemptions = 0
        self._blocks = blocks
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._waiting: deque[Group] = deque()
        self._reserved: set[Group] = set()
        self._fetching: list[Group] = []
        self._prefilling: list[Choice] = []
        self._preempted: deque[Choice] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    @property
    def num_running(self) -> int:
        to_come = sum(group.num_choices for group in (*self._reserved, *self._fetching))
        return len(self.decoding) + len(self._prefilling) + to_come

    @property
    def num_queued_tokens(self) -> int:
        """Tokens still to be computed here, but for one per decoding sequence."""
        local = sum(group.root.num_missing for group in self._waiting if group.source is Source.HERE)
        local += sum(len(group.root.tokens) - group.fetch_end for group in self._fetching)
        return local + sum(choice.sequence.num_missing for choice in (*self._prefilling, *self._preempted))

    def add(self, group: Group) -> None:
        """Queue a request. Raises CapacityError when the queue is full, ContextLengthExceeded when it can never fit."""
        root = group.root
        if len(root.tokens) >= root.max_context:
            raise ContextLengthExceeded(
                f"{len(root.tokens)} tokens leave no room in {root.max_context}", param="prompt"
            )
        if len(self._waiting) >= self._max_waiting:
            raise CapacityError(f"{len(self._waiting)} requests are waiting already")
        place = len(self._waiting)
        while place and self._waiting[place - 1].root.request.priority > root.request.priority:
            place -= 1
        self._waiting.insert(place, group)

    def admit(self) -> list[Group]:
        """Give blocks to the requests that come next, as far as there is room, and return them.

        Of those that are computed here, others may hold more of the prompt than was found: where `fetch_end` lies
        beyond `num_cached`, the positions between are to be brought into its blocks. Then call `fetched`, or
        `fetch_failed`.
        """
        admitted = []
        for group in tuple(self._waiting):
            if self._preempted or not self._has_room(group):
                break
            if group.source is Source.HERE and self._is_on_its_way(group):
                continue  # others go on meanwhile
            if not self._allocate(group.root, reuse_all=group.source is Source.PREFILL, room=_room(group)):
                break
            self._waiting.remove(group)
            group.num_cached = group.root.num_computed
            admitted.append(group)
            if group.source is not Source.HERE:
                self._reserved.add(group)
            elif group.fetch_end > group.num_cached:
                self._fetching.append(group)
            else:
                self._prefill(group)
        return admitted

    def fetched(self, group: Group, num_tokens: int) -> None:
        """The KV of the next `num_tokens` positions is in the group's blocks: what is missing yet is computed."""
        self._fetching.remove(group)
        group.num_fetched = num_tokens
        group.root.computed(num_tokens, self._blocks)
        self._prefill(group)

    def fetch_failed(self, group: Group) -> None:
        """What was offered does not come: the group gives its blocks back, and is the next to be admitted again.

        A block that something may still be written to is the caller's, who has taken it out of the table.
        """
        self._fetching.remove(group)
        group.num_offered = 0
        group.root.release(self._blocks)
        self._waiting.appendleft(group)

    def ready(self, group: Group) -> None:
        """The KV of a request's prompt is whole: it is neither reserved nor prefilling any more."""
        self._reserved.discard(group)
        self._prefilling = [choice for choice in self._prefilling if choice.group is not group]

    def start(self, choice: Choice) -> None:
        """A choice has its next token. It decodes from now on; without blocks, it first computes its KV again."""
        if not choice.sequence.blocks:
            self._preempted.append(choice)
        elif choice not in self.decoding:
            self.decoding.append(choice)
            self._prefilling = [other for other in self._prefilling if other is not choice]

    def remove(self, group: Group) -> None:
        """Take out a request, wherever it is; its blocks stay with the caller."""
        if group in self._waiting:
            self._waiting.remove(group)
        self._reserved.discard(group)
        if group in self._fetching:
            self._fetching.remove(group)
        for choice in [c for c in (*self._prefilling, *self._preempted, *self.decoding) if c.group is group]:
            self.remove_choice(choice)

    def remove_choice(self, choice: Choice) -> None:
        for place in (self.decoding, self._prefilling, self._preempted):
            if choice in place:
                place.remove(choice)

    def schedule(self) -> list[tuple[Choice, int]]:
        """The next step: choices, and how many tokens of each."""
        self._make_room()
        chosen = [(choice, 1) for choice in self.decoding]
        budget = self._max_batch_tokens - len(chosen)
        while self._preempted and len(self.decoding) + len(self._prefilling) < self._max_running:
            if not self._allocate(self._preempted[0].sequence, reuse_all=False):
                break
            insort(self._prefilling, self._preempted.popleft(), key=_priority)
        for choice in self._prefilling:
            if budget <= 0:
                break
            chosen.append((choice, min(budget, choice.sequence.num_missing)))
            budget -= chosen[-1][1]
        return chosen

    def _make_room(self) -> None:
        """See to it that every decoding sequence has a block for its next token, preempting the youngest if need be."""
        kept: list[Choice] = []
        queue = deque(self.decoding)
        while queue:
            sequence = queue[0].sequence
            if self._blocks.extend(sequence.blocks, sequence.num_blocks_for(len(sequence.tokens))):
                kept.append(queue.popleft())
                continue
            victim = queue.pop()
            victim.sequence.release(self._blocks)
            self._preempted.appendleft(victim)
            self.num_preemptions += 1
        self.decoding = kept

    def _prefill(self, group: Group) -> None:
        insort(self._prefilling, Choice(group, group.root, group.root.request.stream), key=_priority)

    def _is_on_its_way(self, group: Group) -> bool:
        """Another prompt's computation, or a fetch, brings the very block that this one lacks first."""
        others = [*(choice.sequence for choice in self._prefilling), *(other.root for other in self._fetching)]
        return group.root.is_behind(others, self._blocks)

    def _has_room(self, group: Group) -> bool:
        """Whether one more request leaves each decoding sequence a block to grow into."""
        root = group.root
        needed = self._blocks.num_needed(root.hashes(), root.num_blocks_for(len(root.tokens) + max(1, _room(group))))
        fits = needed + len(self.decoding) <= self._blocks.num_available
        is_first = not (self.decoding or self._prefilling or self._reserved or self._fetching)
        return (fits or is_first) and self.num_running + group.num_choices <= max(self._max_running, group.num_choices)

    def _allocate(self, sequence: Sequence, *, reuse_all: bool, room: int = 0) -> bool:
        """Give a sequence the blocks of all its tokens, and of `room` more.

        Where it is computed here, at least its last token is; and what is shipped while it decodes lacks the last too.
        """
        num_tokens = len(sequence.tokens)
        num_reusable = num_tokens if reuse_all else sequence.num_reusable(num_tokens)
        reusable = sequence.hashes()[: num_reusable // sequence.block_size]
        taken = self._blocks.allocate(reusable, sequence.num_blocks_for(num_tokens + room))
        if taken is None:
            return False
        sequence.start_with(*taken)
        return True


def _priority(choice: Choice) -> int:
    return choice.sequence.request.priority


def _room(group: Group) -> int:
    """How many tokens more than are known a handoff for this group may bring."""
    if group.source is not Source.DECODE:
        return 0
    return min(ROOM_TOKENS, group.root.max_context - len(group.root.tokens))
