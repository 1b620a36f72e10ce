"""State of one choice of a request in an engine: its tokens, its blocks and its progress."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from core.types.errors import ClusterError, GrammarNotFollowed, LogitsNotFinite, NoTokenAllowed
from core.types.prefix_hash import block_hashes, root_hash
from core.types.request import (
    DraftTally,
    FinishReason,
    SampledToken,
    SequenceRequest,
    TokenLogprob,
    choice_seed,
    finish_reason,
)
from engine.kv.block_manager import BlockManager
from engine.kv.state_manager import StateManager
from engine.kv.window_manager import HeldParts
from engine.sampling.params import SamplingRow
from engine.sampling.token_masks import TokenRuleTensors
from engine.scheduler.prompt_scoring import ScoredRow

# Number of steps without a draft after which an empty tally is reported. An answer that is aborted earlier reports
# none.
_REPORT_STEPS = 32


class Sequence:
    """One choice of a request. Owned by the step thread.

    tokens[:num_computed] have their KV in the pool; the rest is still to be computed. A decoding sequence lacks the KV
    of exactly its last token.
    """

    def __init__(
        self,
        request: SequenceRequest,
        choice: int,
        *,
        model: str,
        block_size: int,
        max_context: int,
        hashes: Iterable[bytes] = (),
        ruled: TokenRuleTensors | None = None,
    ) -> None:
        """hashes: of leading full blocks, if known. ruled: shared with another choice of the request."""
        self.request = request
        self.choice = choice
        self.adapter = 0  # see `Row`
        self.tokens = list(request.token_ids)
        self.sampling_row = SamplingRow(
            sampling=request.sampling,
            seed=choice_seed(request.sampling.seed, choice),
            tokens=self.tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            ruled=ruled,
        )
        self.is_scored = request.num_prompt_logprobs is not None  # the prompt's log-probabilities are still missing
        self.num_computed = 0
        self.blocks: list[int] = []
        self.parts = HeldParts()
        # With recurrent layers: the slot of the state, then those that the scheduled step writes for checkpoints and
        # drafts. Numbered as in BlockManager.
        self.state_slots: list[int] = []
        self.state_index = 0  # pool index of state_slots[0]
        self.checkpoints_at: list[int] = []  # positions of planned checkpoints of the state, ascending
        # Checkpoints that the scheduled step writes: state slot, and hash of the block that ends there.
        self._unfilled: list[tuple[int, bytes]] = []
        self._last_checkpoint = b""  # hash of the last checkpoint made while decoding
        self.max_context = max_context
        # Upper bound of the number of tokens.
        self.ends_at = min(request.num_prompt_tokens + request.sampling.max_tokens, max_context)
        self.drafts: DraftTally | None = None  # since the last `take_drafts`; None if drafting is off
        self.stops = frozenset(request.sampling.stop_token_ids)
        # Limit for forced tokens: the replica to which this sequence moves has room for this many tokens.
        self.most_tokens = max_context
        self.block_size = block_size
        self.model = model
        self._root = root_hash(model, adapter=request.adapter, salt=request.salt)
        self._hashes = list(hashes)  # of the full blocks of `tokens`, computed on demand
        # The number of computed positions at which the next block is full and enters the prefix cache.
        self.fills_block_at = block_size
        self._depth = 0  # cached-prefix length at the last lookup, in blocks

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.request.num_prompt_tokens

    def take_drafts(self, *, is_last: bool) -> DraftTally | None:
        """Return the drafting tally since the last report, if a report is due."""
        tally = self.drafts
        if tally is None or not (is_last or tally.drafts or tally.steps >= _REPORT_STEPS):
            return None
        self.drafts = DraftTally()
        return tally

    @property
    def num_missing(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.tokens) - self.num_computed

    @property
    def num_in_flight(self) -> int:
        """See SamplingRow."""
        return self.sampling_row.num_in_flight

    @property
    def ends_with_next(self) -> bool:
        """True if the next token is the last one, whatever it is."""
        return len(self.tokens) + 1 >= self.ends_at

    def num_reusable(self, num_tokens: int) -> int:
        """Return how many of `num_tokens` held leading tokens can be reused: full blocks without the last token.

        The logits of the last token are always needed. A scored prompt needs all logits, so nothing is reusable.
        """
        if self.is_scored:
            return 0
        return min(num_tokens, len(self.tokens) - 1) // self.block_size * self.block_size

    def hashes(self) -> list[bytes]:
        """Return the prefix hashes of all full blocks."""
        parent = self._hashes[-1] if self._hashes else self._root
        self._hashes += block_hashes(parent, self.tokens, block_size=self.block_size, after=len(self._hashes))
        return self._hashes

    def is_behind(self, others: Collection[Sequence], blocks: BlockManager) -> bool:
        """Return True if one of `others`, which are being computed, will fill the first block missing here.

        With recurrent states, check instead whether one will make a checkpoint after the last one usable here.
        """
        if self.is_scored:
            return False
        if blocks.states:
            return any(other.will_checkpoint_for(self, blocks.match_reusable(self.hashes())) for other in others)
        if blocks.windows:
            # A cached block may lack its part. Another sequence brings the part only if it still has to compute the
            # block.
            depth = blocks.match_reusable(self.hashes())
            others = [other for other in others if other.num_computed < (depth + 1) * self.block_size]
            wanted = self._hashes[depth : depth + 1]
            return bool(wanted) and any(other.hashes()[depth : depth + 1] == wanted for other in others)
        # Start at the last known depth: while another sequence brings the next block, all blocks before it are in that
        # sequence's table.
        for known in dict.fromkeys((self._depth, 0)):
            self._depth = blocks.match(self.hashes(), after=known)
            wanted = self._hashes[self._depth : self._depth + 1]
            if wanted and any(other.hashes()[self._depth : self._depth + 1] == wanted for other in others):
                return True
        return False

    def will_checkpoint_for(self, other: Sequence, depth: int) -> bool:
        """Return True if a planned checkpoint is at the end of a shared prefix of more than `depth` blocks."""
        ends = [position // self.block_size for position in self.checkpoints_at]
        own, others = self.hashes(), other.hashes()
        most = min(len(own), len(others))  # a checkpoint of the answer may be planned, too
        return any(depth < end <= most and own[end - 1] == others[end - 1] for end in ends)

    def scored_row(self, row: int, num_tokens: int) -> ScoredRow | None:
        """Return the scoring request of the next `num_tokens` positions, computed in row `row`; None without one."""
        if not self.is_scored:
            return None
        start = self.num_computed + 1
        next_tokens = self.tokens[start : min(start + num_tokens, self.request.num_prompt_tokens)]
        return ScoredRow(row, next_tokens, self.request.num_prompt_logprobs or 0) if next_tokens else None

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def sampling_row_of(self, choice: int) -> SamplingRow:
        """Return the sampling row of a choice of this request that has the same tokens so far."""
        row = self.sampling_row
        return row if choice == self.choice else replace(row, seed=choice_seed(row.sampling.seed, choice))

    def start_with(self, blocks: list[int], num_cached: int) -> None:
        """Take a block table whose first `num_cached` blocks already hold this sequence's prefix."""
        self.blocks = blocks
        self.num_computed = num_cached * self.block_size
        self.fills_block_at = self.num_computed + self.block_size

    def start_state(self, slot: int, states: StateManager, *, num_cached: int) -> None:
        """Use a state slot, and plan checkpoints at the end of the cached blocks and of the prompt's last full block.

        num_cached: number of cached blocks, which may end after the checkpoint that the sequence continues from.
        """
        self.use_state(slot, states)
        ends = {num_cached * self.block_size, self.num_reusable(len(self.tokens))}
        self.checkpoints_at = sorted(end for end in ends if end > self.num_computed)

    def use_state(self, slot: int, states: StateManager) -> None:
        """Replace its state slots by this one. The caller frees the previous ones."""
        self.state_slots, self.state_index = [slot], states.index(slot)

    def checkpoint_state(self, states: StateManager) -> None:
        """Copy its state to a checkpoint, if one is planned at the next position to compute.

        If no further one is planned, plan one at the next multiple of `states.interval`.
        """
        position = self.num_computed + self.num_in_flight
        while self.checkpoints_at and self.checkpoints_at[0] <= position:
            if self.checkpoints_at.pop(0) == position:
                states.checkpoint(self.state_slots[0], self._hash_before(position))
                self._replace_checkpoint(position, states)
        if not self.checkpoints_at:
            self.checkpoints_at = [(position // states.interval + 1) * states.interval]

    def keep_passed(self, slots: list[int], states: StateManager) -> None:
        """Turn a state that the last step passed into a checkpoint, if one is planned at its position.

        Removes that state's slot from `slots`: the slots of the states at the last computed positions, in order.
        """
        first = self.num_computed - len(slots)
        if self.checkpoints_at and first <= self.checkpoints_at[0] < self.num_computed:
            position = self.checkpoints_at.pop(0)
            states.fill_slot(slots.pop(position - first), self._hash_before(position))
            self._replace_checkpoint(position, states)

    def _replace_checkpoint(self, position: int, states: StateManager) -> None:
        """Forget the answer's previous checkpoint: an answer keeps only its last one, a prompt keeps all."""
        if position > self.request.num_prompt_tokens:
            prefix_hash = self._hash_before(position)
            if prefix_hash != self._last_checkpoint:
                states.forget(self._last_checkpoint)
            self._last_checkpoint = prefix_hash

    def checkpoint_fetched(self, states: StateManager) -> None:
        """Copy the state to a checkpoint after a prefix was fetched."""
        states.checkpoint(self.state_slots[0], self._hash_before(self.num_computed))

    def take_checkpoint_slots(self, num_tokens: int, states: StateManager) -> list[tuple[int, int]]:
        """Take slots for the planned checkpoints within the next `num_tokens` tokens; none if all slots are held.

        Returns pairs: offset of a token, and index of the slot to which the step writes the state after this token.
        """
        start, writes = self.num_computed, list[tuple[int, int]]()
        while self.checkpoints_at and self.checkpoints_at[0] < start + num_tokens:
            end = self.checkpoints_at.pop(0)
            if states.num_available:
                slot = states.take()
                self.state_slots.append(slot)
                self._unfilled.append((slot, self._hash_before(end)))
                writes.append((end - start - 1, states.index(slot)))
        return writes

    def _hash_before(self, position: int) -> bytes:
        """Return the prefix hash of the block that ends at a position."""
        return self.hashes()[position // self.block_size - 1]

    def computed(self, num_tokens: int, blocks: BlockManager) -> None:
        """Record the KV of the next `num_tokens` positions as present. Cache full blocks, and checkpoints written."""
        self.num_computed += num_tokens
        if self.num_computed >= self.fills_block_at:
            self.fill_block(blocks)
        if blocks.windows:
            self.parts.advance(blocks.windows.first_seen(self.num_computed), blocks.windows)
        if self._unfilled and blocks.states:
            for slot, prefix_hash in self._unfilled:
                self.state_slots.remove(slot)
                blocks.states.fill_slot(slot, prefix_hash)
            self._unfilled = []

    def fill_block(self, blocks: BlockManager) -> None:
        """Cache the full blocks. Requires at least `fills_block_at` computed positions."""
        num_full, hashes = self.num_computed // self.block_size, self.hashes()
        for number in range(self.fills_block_at // self.block_size - 1, num_full):
            blocks.fill_block(self.blocks[number], hashes[number])
        self.fills_block_at = (num_full + 1) * self.block_size

    def append(self, token_id: int, logprob: TokenLogprob | None = None) -> SampledToken:
        """Append the next token and return it with its finish reason."""
        self.tokens.append(token_id)
        return SampledToken(token_id, logprob, self.finish_reason())

    def peek(self, token_id: int, logprob: TokenLogprob | None = None) -> SampledToken:
        """Return what `append` would return, without appending."""
        return SampledToken(token_id, logprob, self._finish_reason(token_id, len(self.tokens) + 1))

    def finish_reason(self) -> FinishReason | None:
        """Return the reason why the sequence ends with its last token; None if it continues."""
        return self._finish_reason(self.tokens[-1], len(self.tokens))

    def _finish_reason(self, token_id: int, num_tokens: int) -> FinishReason | None:
        return finish_reason(
            token_id,
            num_generated=num_tokens - self.request.num_prompt_tokens,
            num_tokens=num_tokens,
            sampling=self.request.sampling,
            max_context=self.max_context,
        )

    def fork(self, choice: int, blocks: BlockManager) -> tuple[Sequence, tuple[int, int] | None] | None:
        """Return another choice of the same request that shares every full block with this one.

        A partly filled last block is copied: the second value is (source, target) of that copy. Returns None and takes
        nothing if there is no free block.
        """
        twin = self.without_blocks(choice)
        num_full = self.num_computed // self.block_size
        own: list[int] = []
        if blocks.states and not blocks.states.num_available:
            return None
        windows = blocks.windows
        if windows and windows.num_unreserved < windows.num_for(self.ends_at):
            return None
        if not blocks.extend(own, len(self.blocks[num_full : self.num_blocks_for(self.num_computed)])):
            return None
        blocks.share(self.blocks[:num_full])
        if blocks.states:
            twin.use_state(blocks.states.fork(self.state_slots[0]), blocks.states)
        twin.blocks = self.blocks[:num_full] + own
        if windows:
            twin.parts.reserve(windows.num_for(self.ends_at), windows)
            twin.parts.hold(self.blocks, self.parts.first, num_full, windows)
            twin.parts.extend(twin.blocks, len(twin.blocks), windows)
        twin.num_computed, twin.fills_block_at, twin._hashes = (
            self.num_computed,
            self.fills_block_at,
            list(self._hashes),
        )
        return twin, (self.blocks[num_full], own[0]) if own else None

    def without_blocks(self, choice: int) -> Sequence:
        """Return another choice of the same request with nothing computed."""
        twin = Sequence(
            self.request,
            choice,
            model=self.model,
            block_size=self.block_size,
            max_context=self.max_context,
            ruled=self.sampling_row.ruled,
        )
        twin.adapter, twin.is_scored = self.adapter, self.is_scored
        if mask := self.sampling_row.mask:
            twin.sampling_row.mask = mask.fork()
        return twin

    @property
    def failure(self) -> ClusterError:
        """Error to report if no next token could be chosen."""
        if reason := self._grammar_failure:
            return GrammarNotFollowed(f"{self.request.id}: {reason}")
        if self.sampling_row.is_contradicted:
            return NoTokenAllowed.of(self.request.id)
        return LogitsNotFinite.of(self.request.id)

    @property
    def is_contradicted(self) -> bool:
        """True if the request's constraints allow no next token; its KV is fine."""
        return self.sampling_row.is_contradicted or bool(self._grammar_failure)

    @property
    def _grammar_failure(self) -> str:
        mask = self.sampling_row.mask
        return mask.failure if mask else ""

    def drop_state(self, states: StateManager) -> None:
        """Free the state slots, which no longer hold this sequence's state. Its checkpoints stay in the cache."""
        states.free(self.state_slots)
        self.state_slots, self.checkpoints_at, self._unfilled = [], [], []

    def leave_out(self, blocks: Collection[int]) -> None:
        """Remove `blocks`, which may include the state slot, from this sequence without freeing them."""
        removed = set(blocks)
        self.blocks = [block for block in self.blocks if block not in removed]
        self.parts.leave_out(removed)
        self.state_slots = [slot for slot in self.state_slots if slot not in removed]

    def release(self, blocks: BlockManager) -> None:
        """Free all blocks and state slots. Cached ones can be reused until their space is needed."""
        if blocks.windows:
            self.parts.release(blocks.windows)
        blocks.free(self.blocks + self.state_slots)
        self.blocks, self.state_slots, self.checkpoints_at, self._unfilled = [], [], [], []
        self.sampling_row.num_in_flight = 0  # the token in flight is chosen again
        self.num_computed, self.fills_block_at = 0, self.block_size
