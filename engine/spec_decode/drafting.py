"""What an engine asks of speculation: drafts for the rows of a step, within its room and what its time is worth."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Protocol

from core.types.request import DraftTally
from core.types.step_timing import StepTiming
from engine.kv.block_manager import BlockManager
from engine.scheduler.sequence import Sequence
from engine.spec_decode.draft import Draft
from engine.spec_decode.draft_plan import FREE, StepPrice
from engine.spec_decode.speculation import Speculation

# A token that is drafted for one row makes all the others wait; and of many guesses those are taken that are believed
# too much.
_MARGIN = 1.5


class Prices(Protocol):
    """What steps take, as far as it is known."""

    @property
    def timing(self) -> StepTiming | None: ...

    @property
    def draft_factors(self) -> Seq[float]:
        """What steps with drafts take, beside steps without that have as many tokens; see engine.timing.draft_cost."""
        ...

    def set_aside(self, seconds: float, /) -> None:
        """So much of the next step's time is not the step's: somebody was asked before it."""
        ...


class Drafting:
    """Owned by the step thread."""

    def __init__(
        self,
        speculation: Speculation | None,
        pace: Prices | None,
        blocks: BlockManager,
        *,
        max_batch_tokens: int,
        max_running: int,
    ) -> None:
        """speculation: None where nothing is drafted. pace: None where all that may be right is drafted."""
        self._speculation = speculation
        self._pace = pace
        self._blocks = blocks
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._floor: tuple[int, float] = 0, 0.0  # of so many rows, the last time that somebody looked

    @property
    def is_on(self) -> bool:
        """Whether anything is ever drafted."""
        return self._speculation is not None

    def drafts(self, rows: Seq[Sequence], *, num_tokens: int, num_logits: int) -> dict[Sequence, Draft]:
        """For rows of a step that decode, beside which it computes so many tokens and wants so many logits. With what
        they leave of a step's tokens, and no more logits than those of the largest batch, for which there is memory.

        Not for a step that is launched behind another one."""
        assert not any(sequence.num_in_flight for sequence in rows)
        if self._speculation is None or not rows:
            return {}
        most = min(self._max_batch_tokens - num_tokens, self._max_running - num_logits)
        if most < 1:
            return {}
        price = partial(self._price, rows, num_tokens)
        drafts = self._speculation.draft(rows, price, max_tokens=most, blocks=self._blocks)
        if self._pace and (asking_s := self._speculation.take_asking_s()):
            self._pace.set_aside(asking_s)
        return drafts

    def awaits(self, running: Collection[Sequence]) -> bool:
        """Whether it would be worth something to know the tokens of the step under way before the next is planned."""
        most = self._max_running - len(running)
        if self._speculation is None or most < 1:
            return False
        rows = list(running)
        return self._speculation.awaits(rows, partial(self._price, rows, len(rows)), max_tokens=most)

    def computed(
        self, decoding: Seq[tuple[Sequence, int]], drafts: Mapping[Sequence, Draft], *, num_tokens: int
    ) -> None:
        """A step of so many tokens is over: note of its rows why those without a draft had none. Before they get their
        tokens."""
        if self._speculation is None or not decoding:
            return
        rows = [sequence for sequence, _ in decoding]
        if self._floor[0] != len(rows):
            self._price(rows, num_tokens - sum(draft.num_tokens for draft in drafts.values()))
        floor = self._floor[1]
        for row in rows:
            tally = row.drafts = row.drafts or DraftTally()
            tally.steps += 1
            tally.unguessed += row not in drafts and not self._speculation.has_guess(row)
            tally.floors += floor

    def verified(self, draft: Draft, chosen: Seq[int]) -> None:
        """A step has shown what its sequence goes on with."""
        assert self._speculation
        self._speculation.verified(draft, chosen)

    def finished(self, sequence: Sequence) -> None:
        """It has its last token."""
        if self._speculation:
            self._speculation.finished(sequence)

    def forget(self, sequence: Sequence) -> None:
        """It gets no more tokens here, or none for now."""
        if self._speculation:
            self._speculation.forget(sequence)

    def _price(self, rows: Seq[Sequence], num_tokens: int) -> StepPrice:
        price = self._known_price(rows, num_tokens)
        self._floor = len(rows), price.floor(len(rows))
        return price

    def _known_price(self, rows: Seq[Sequence], num_tokens: int) -> StepPrice:
        timing = self._pace.timing if self._pace else None
        if self._pace is None or timing is None:
            return FREE
        num_context = sum(len(sequence.tokens) for sequence in rows)
        plain_s = timing.step_s(num_tokens=num_tokens, num_pairs=0, num_context=num_context)
        if not plain_s:
            return FREE
        token_s, context_s = timing.token_s * _MARGIN, timing.context_s * _MARGIN
        factors = self._pace.draft_factors
        return StepPrice(plain=plain_s, token=token_s, num_tokens=num_tokens, factors=factors, context=context_s)
