"""A request inside one engine: one choice, its tokens, its blocks, and how far it has come."""

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

_TOLD_STEPS = 32  # without a draft, until it is told that there was none; a client that leaves does not hear of these


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
        """hashes: those of the leading full blocks, as far as somebody has worked them out before. ruled: of another
        choice of the request."""
        self.request = request
        self.choice = choice
        self.adapter = 0  # see Row
        self.tokens = list(request.token_ids)
        self.sampling_row = SamplingRow(
            sampling=request.sampling,
            seed=choice_seed(request.sampling.seed, choice),
            tokens=self.tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            ruled=ruled,
        )
        # The log-probabilities of its prompt are still to be told.
        self.is_scored = request.num_prompt_logprobs is not None
        self.num_computed = 0
        self.blocks: list[int] = []
        self.max_context = max_context
        # With so many tokens it ends at the latest.
        self.ends_at = min(request.num_prompt_tokens + request.sampling.max_tokens, max_context)
        self.drafts: DraftTally | None = None  # since somebody took it; None where nothing is drafted
        self.stops = frozenset(request.sampling.stop_token_ids)
        self.most_tokens = max_context  # it gets no known tokens beyond: where it moves to there is room for so many
        self.keeps_blocks = False  # somebody else reads them: none of its table gives way to another
        self.block_size = block_size
        self.model = model
        self._root = root_hash(model, adapter=request.adapter, salt=request.salt)
        self._hashes = list(hashes)  # of the full blocks of `tokens`, as far as they have been asked for
        self.fills_block_at = block_size  # with so many positions computed, a block is full that nobody can find yet
        self._depth = 0  # of the first block that was not to be found when somebody last looked

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.request.num_prompt_tokens

    def take_drafts(self, *, is_last: bool) -> DraftTally | None:
        """What was drafted since the last call, if it is time to tell somebody of it."""
        tally = self.drafts
        if tally is None or not (is_last or tally.drafts or tally.steps >= _TOLD_STEPS):
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
        """Whatever its next token is."""
        return len(self.tokens) + 1 >= self.ends_at

    def num_reusable(self, num_tokens: int) -> int:
        """How many leading tokens need not be computed here where so many are held: full blocks, and not the last
        token, for its logits are wanted. Of a prompt that is scored all logits are."""
        if self.is_scored:
            return 0
        return min(num_tokens, len(self.tokens) - 1) // self.block_size * self.block_size

    def hashes(self) -> list[bytes]:
        """The prefix hashes of every full block of tokens."""
        parent = self._hashes[-1] if self._hashes else self._root
        self._hashes += block_hashes(parent, self.tokens, block_size=self.block_size, after=len(self._hashes))
        return self._hashes

    def is_behind(self, others: Collection[Sequence], blocks: BlockManager) -> bool:
        """One of `others`, which are being computed, will seal the first block that this one would not find now."""
        if self.is_scored:
            return False
        # While somebody brings the next block, all before it are in their table, and need not be looked for again.
        for known in dict.fromkeys((self._depth, 0)):
            self._depth = blocks.match(self.hashes(), after=known)
            wanted = self._hashes[self._depth : self._depth + 1]
            if wanted and any(other.hashes()[self._depth : self._depth + 1] == wanted for other in others):
                return True
        return False

    def scored_row(self, row: int, num_tokens: int) -> ScoredRow | None:
        """What is to be told of its next so many positions, which are that row of a step; None: nothing."""
        if not self.is_scored:
            return None
        start = self.num_computed + 1
        next_tokens = self.tokens[start : min(start + num_tokens, self.request.num_prompt_tokens)]
        return ScoredRow(row, next_tokens, self.request.num_prompt_logprobs or 0) if next_tokens else None

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def sampling_row_of(self, choice: int) -> SamplingRow:
        """How the next token is to be chosen; or that of another choice of the request, with the same tokens so far."""
        row = self.sampling_row
        return row if choice == self.choice else replace(row, seed=choice_seed(row.sampling.seed, choice))

    def start_with(self, blocks: list[int], num_cached: int) -> None:
        """Take a block table whose first `num_cached` blocks hold this sequence's prefix already."""
        self.blocks = blocks
        self.num_computed = num_cached * self.block_size
        self.fills_block_at = self.num_computed + self.block_size

    def computed(self, num_tokens: int, blocks: BlockManager) -> None:
        """The KV of the next `num_tokens` positions is in the pool: let others find the blocks that became full."""
        self.num_computed += num_tokens
        if self.num_computed >= self.fills_block_at:
            self.fill_block(blocks)

    def fill_block(self, blocks: BlockManager) -> None:
        """Let others find the blocks that are full: `fills_block_at` positions are computed, or more."""
        num_full, hashes = self.num_computed // self.block_size, self.hashes()
        for number in range(self.fills_block_at // self.block_size - 1, num_full):
            blocks.fill_block(self.blocks[number], hashes[number])
        self.fills_block_at = (num_full + 1) * self.block_size

    def append(self, token_id: int, logprob: TokenLogprob | None = None) -> SampledToken:
        """Take the next token, and say whether it is the last."""
        self.tokens.append(token_id)
        return SampledToken(token_id, logprob, self.finish_reason())

    def peek(self, token_id: int, logprob: TokenLogprob | None = None) -> SampledToken:
        """What `append` would say of this token."""
        return SampledToken(token_id, logprob, self._finish_reason(token_id, len(self.tokens) + 1))

    def finish_reason(self) -> FinishReason | None:
        """Why it ends with its last token; None: it goes on."""
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
        """Another choice of the same request, which shares every full block with this one.

        A partly filled last block needs a copy of its own: the second value is (source, target) of the copy to make.
        None, taking nothing, if there is no block left for it.
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
        """Another choice of the same request, of which nothing is computed."""
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
        """Why it has no next token, where none was to be found."""
        if why := self._grammar_failure:
            return GrammarNotFollowed(f"{self.request.id}: {why}")
        if self.sampling_row.is_contradicted:
            return NoTokenAllowed.of(self.request.id)
        return LogitsNotFinite.of(self.request.id)

    @property
    def is_contradicted(self) -> bool:
        """What is asked leaves no next token: nothing is wrong with its KV."""
        return self.sampling_row.is_contradicted or bool(self._grammar_failure)

    @property
    def _grammar_failure(self) -> str:
        mask = self.sampling_row.mask
        return mask.failure if mask else ""

    def leave_out(self, blocks: Collection[int]) -> None:
        """These blocks of the table are not this sequence's any more."""
        self.blocks = [block for block in self.blocks if block not in blocks]

    def release(self, blocks: BlockManager) -> None:
        """Give all blocks back. What was sealed stays in the cache until its space is needed."""
        blocks.free(self.blocks)
        self.blocks = []
        self.sampling_row.num_in_flight = 0  # that token is chosen again
        self.num_computed, self.fills_block_at = 0, self.block_size
