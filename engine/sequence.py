"""A request inside one engine: one choice, its tokens, its blocks, and how far it has come."""

from __future__ import annotations

from cluster.hashing import block_hashes, root_hash
from cluster.request import FinishReason, SampledToken, SequenceRequest, TokenLogprob, choice_seed, finish_reason
from engine.batch import Row
from engine.block_manager import BlockManager


class Sequence:
    """One choice of a request. Owned by the step thread.

    tokens[:num_computed] have their KV in the pool; the rest is still to be computed. A decoding sequence lacks the KV
    of exactly its last token.
    """

    def __init__(self, request: SequenceRequest, choice: int, *, model: str, block_size: int, max_context: int) -> None:
        self.request = request
        self.choice = choice
        self.seed = choice_seed(request.sampling.seed, choice)
        self.tokens = list(request.token_ids)
        self.num_computed = 0
        self.blocks: list[int] = []
        self.max_context = max_context
        self.block_size = block_size
        self._root = root_hash(model, adapter=request.adapter, salt=request.salt)
        self._hashes: list[bytes] = []  # of the full blocks of `tokens`, as far as they have been asked for
        self._num_sealed = 0

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.request.num_prompt_tokens

    @property
    def num_missing(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.tokens) - self.num_computed

    def hashes(self) -> list[bytes]:
        """The prefix hashes of every full block of tokens."""
        parent = self._hashes[-1] if self._hashes else self._root
        self._hashes += block_hashes(parent, self.tokens, block_size=self.block_size, after=len(self._hashes))
        return self._hashes

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def row(self, num_tokens: int) -> Row:
        """The next `num_tokens` positions of this sequence as part of a batch."""
        end = self.num_computed + num_tokens
        return Row(
            token_ids=self.tokens[self.num_computed : end],
            start=self.num_computed,
            blocks=self.blocks,
            wants_logits=end == len(self.tokens),
        )

    def computed(self, num_tokens: int, blocks: BlockManager) -> None:
        """The KV of the next `num_tokens` positions is in the pool: let others find the blocks that became full."""
        self.num_computed += num_tokens
        hashes = self.hashes()
        while self._num_sealed < min(self.num_computed // self.block_size, len(hashes)):
            blocks.seal(self.blocks[self._num_sealed], hashes[self._num_sealed])
            self._num_sealed += 1

    def append(self, token_id: int, logprob: TokenLogprob | None) -> SampledToken:
        """Take the next token, and say whether it is the last."""
        self.tokens.append(token_id)
        return SampledToken(token_id=token_id, logprob=logprob, finish_reason=self.finish_reason())

    def finish_reason(self) -> FinishReason | None:
        """Why the last token is the last, or None."""
        return finish_reason(
            self.tokens[-1],
            num_generated=self.num_generated,
            num_tokens=len(self.tokens),
            sampling=self.request.sampling,
            max_context=self.max_context,
        )

    def release(self, blocks: BlockManager) -> None:
        """Give all blocks back. What was sealed stays in the cache until its space is needed."""
        blocks.free(self.blocks)
        self.blocks = []
        self.num_computed = self._num_sealed = 0
