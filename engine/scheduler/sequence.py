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
from engine.sampling.params import SamplingRow
from engine.sampling.token_masks import TokenRuleTensors
from engine.scheduler.prompt_scoring import ScoredRow

# Steps without a draft until an empty tally is reported. A client that disconnects earlier does not get them.
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
        # The log-probabilities of its prompt are still to be computed.
        self.is_scored = request.num_prompt_logprobs is not None
        self.num_computed = 0
        self.blocks: list[int] = []
        self.max_context = max_context
        # Upper bound of its number of tokens.
        self.ends_at = min(request.num_prompt_tokens + request.sampling.max_tokens, max_context)
        self.drafts: DraftTally | None = None  # since the last `take_drafts`; None if drafting is off
        self.stops = frozenset(request.sampling.stop_token_ids)
        # Forced tokens stop here, because the replica that it moves to has room for this many.
        self.most_tokens = max_context
        self.block_size = block_size
        self.model = model
        self._root = root_hash(model, adapter=request.adapter, salt=request.salt)
        self._hashes = list(hashes)  # of the full blocks of `tokens`, computed on demand
        # The number of computed positions at which the next block is full and becomes findable.
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
        """Return True if one of `others`, which are being computed, will fill the first block missing here."""
        if self.is_scored:
            return False
        # Start at the last known depth: while another sequence brings the next block, all blocks before it are in that
        # sequence's table.
        for known in dict.fromkeys((self._depth, 0)):
            self._depth = blocks.match(self.hashes(), after=known)
            wanted = self._hashes[self._depth : self._depth + 1]
            if wanted and any(other.hashes()[self._depth : self._depth + 1] == wanted for other in others):
                return True
        return False

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

    def computed(self, num_tokens: int, blocks: BlockManager) -> None:
        """Record the KV of the next `num_tokens` positions as present, and cache the blocks that became full."""
        self.num_computed += num_tokens
        if self.num_computed >= self.fills_block_at:
            self.fill_block(blocks)

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
        if not blocks.extend(own, len(self.blocks[num_full : self.num_blocks_for(self.num_computed)])):
            return None
        blocks.share(self.blocks[:num_full])
        twin.blocks = self.blocks[:num_full] + own
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

    def leave_out(self, blocks: Collection[int]) -> None:
        """Remove these blocks from the table without freeing them."""
        self.blocks = [block for block in self.blocks if block not in blocks]

    def release(self, blocks: BlockManager) -> None:
        """Free all blocks. Cached ones stay findable until their space is needed."""
        blocks.free(self.blocks)
        self.blocks = []
        self.sampling_row.num_in_flight = 0  # the token in flight is chosen again
        self.num_computed, self.fills_block_at = 0, self.block_size
