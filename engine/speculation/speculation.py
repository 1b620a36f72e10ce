"""What is drafted in the steps of a replica, and what has come of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from operator import mul
from typing import Literal
from weakref import WeakKeyDictionary

from engine.kv.block_manager import BlockManager
from engine.sequence import Sequence
from engine.speculation.acceptance import Acceptance, RowAcceptance
from engine.speculation.corpus import Corpus
from engine.speculation.draft import Draft, take_room
from engine.speculation.draft_plan import StepPrice, plan_drafts
from engine.speculation.histories import Histories
from engine.speculation.ngram import Ngram
from engine.speculation.proposer import Proposal, Proposer
from engine.speculation.suffix import Suffix

Method = Literal["ngram", "suffix", "auto"]

_MANY = 8  # rows
_IN_VAIN = 16  # looks
_LOOK_EVERY = 8  # steps
_TRY_EVERY = 64  # looks of which nothing comes: prices are learnt from steps that draft
_TRIED = 3  # tokens of one row
_TRY_ABOVE = 0.5  # as likely as that they are right


@dataclass(eq=False, slots=True)
class _Guess:
    """What a method has said of a row: until the row's own tokens have shown how much of it was right."""

    start: int  # position of its first token
    tokens: Seq[int]
    kinds: Seq[int]
    chances: Seq[float]  # of each, that it and those before it are right


@dataclass(eq=False, slots=True)
class _Row:
    guesses: dict[str, _Guess] = field(default_factory=dict)  # by method
    acceptance: dict[str, RowAcceptance] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class DraftCounts:
    """Of one method: drafted tokens, and those that were accepted, by place in their draft."""

    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)


class Speculation:
    """Owned by the step thread. Methods guess for every row, also where nothing is drafted: what becomes of the row
    says how good they are, and costs no step."""

    def __init__(self, methods: Mapping[str, Proposer], *, max_tokens: int, vocab_size: int) -> None:
        """max_tokens: of a draft. Where there are several methods, for each row the one that promises most drafts."""
        self.counts = {method: DraftCounts() for method in methods}
        self._methods = methods
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._acceptance = {method: Acceptance() for method in methods}
        self._rows: WeakKeyDictionary[Sequence, _Row] = WeakKeyDictionary()
        self._num_without = 0  # steps without a draft since the last trial
        self._num_in_vain = 0  # looks since something was worth drafting
        self._num_passed_over = 0  # steps since the last look

    @classmethod
    def of(cls, method: Method, *, max_tokens: int, vocab_size: int, corpus: Corpus | None = None) -> Speculation:
        """corpus: None, one of its own."""
        histories = Histories()
        known: dict[str, Proposer] = {"ngram": Ngram(histories), "suffix": Suffix(histories, corpus or Corpus())}
        names = list(known) if method == "auto" else [str(method)]
        return cls({name: known[name] for name in names}, max_tokens=max_tokens, vocab_size=vocab_size)

    def draft(
        self, rows: Seq[Sequence], price: StepPrice, *, max_tokens: int, blocks: BlockManager
    ) -> dict[Sequence, Draft]:
        """For rows of a step that are about to compute their last tokens; all together at most so many tokens. Blocks
        for them are taken."""
        if self._passes_over(rows):
            return {}
        best = self._best(rows)
        chances = [
            guess.chances[: self._most(row)] if guess else () for row, (_, guess) in zip(rows, best, strict=True)
        ]
        lengths = plan_drafts(chances, len(rows), price, max_tokens)
        self._num_in_vain = 0 if any(lengths) else self._num_in_vain + 1
        if not any(lengths):
            lengths = self._try_one(chances, max_tokens)
        drafts: dict[Sequence, Draft] = {}
        for row, (method, guess), length in zip(rows, best, lengths, strict=True):
            if guess and length:
                num_blocks = len(row.blocks)
                if taken := take_room(row, length, blocks):
                    drafts[row] = Draft(tokens=guess.tokens[:taken], num_blocks=num_blocks, method=method)
        return drafts

    def awaits(self, rows: Seq[Sequence], price: StepPrice, *, max_tokens: int) -> bool:
        """Whether something would be drafted for them as they are now."""
        if self._passes_over(rows):
            return False
        chances = [guess.chances if guess else () for _, guess in self._best(rows)]
        is_worth_it = any(plan_drafts(chances, len(rows), price, max_tokens))
        self._num_in_vain = 0 if is_worth_it else self._num_in_vain + 1
        return is_worth_it

    def verified(self, draft: Draft, chosen: Seq[int]) -> None:
        """A step has shown what its sequence goes on with."""
        counts, pairs = self.counts[draft.method], zip(draft.tokens, chosen, strict=False)
        num_accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        counts.drafted.update(range(len(draft.tokens)))
        counts.accepted.update(range(num_accepted))

    def finished(self, sequence: Sequence) -> None:
        """It has its last token."""
        for proposer in self._methods.values():
            proposer.finished(sequence)

    def _passes_over(self, rows: Seq[Sequence]) -> bool:
        """Beside many rows, where nothing has been worth it for a while: a look takes up to 30 us a row."""
        if len(rows) < _MANY or self._num_in_vain < _IN_VAIN:
            return False
        self._num_passed_over = (self._num_passed_over + 1) % _LOOK_EVERY
        return self._num_passed_over > 0

    def _most(self, row: Sequence) -> int:
        """Tokens that may be drafted for a row: the step chooses one more, and it gets none beyond its end."""
        return max(0, min(self._max_tokens, row.most_tokens - len(row.tokens), row.last_token - len(row.tokens) - 1))

    def _best(self, sequences: Seq[Sequence]) -> list[tuple[str, _Guess | None]]:
        """For each the guess that promises most tokens, and whose it is."""
        rows = [self._row(sequence) for sequence in sequences]
        for method in self._methods:
            self._guess(method, sequences, rows)
        return [max(row.guesses.items(), key=_promise, default=("", None)) for row in rows]

    def _row(self, sequence: Sequence) -> _Row:
        row = self._rows.get(sequence)
        if row is None:
            row = self._rows[sequence] = _Row()
        return row

    def _guess(self, method: str, sequences: Seq[Sequence], rows: Seq[_Row]) -> None:
        """See to it that the method's guesses are of the tokens that sequences have now."""
        asked = []
        for sequence, row in zip(sequences, rows, strict=True):
            guess = row.guesses.get(method)
            if guess is None or guess.start < len(sequence.tokens):
                self._learn(method, row, sequence)
                asked.append((sequence, row))
        if asked:
            proposals = self._methods[method].propose([sequence for sequence, _ in asked], self._max_tokens)
            for (sequence, row), proposal in zip(asked, proposals, strict=True):
                self._note(method, proposal, row, sequence)

    def _learn(self, method: str, row: _Row, sequence: Sequence) -> None:
        """From what has become of the last guess, as far as the row has come since then."""
        guess = row.guesses.pop(method, None)
        if guess is None:
            return
        known = sequence.tokens[guess.start : guess.start + len(guess.tokens)]
        num_right = next((i for i, token in enumerate(known) if token != guess.tokens[i]), len(known))
        num_reached = min(num_right + 1, len(known))
        acceptance = row.acceptance.setdefault(method, RowAcceptance())
        acceptance.saw(sum(self._acceptance[method].chance(kind) for kind in guess.kinds[:num_reached]), num_right)
        self._acceptance[method].saw(guess.kinds, num_right, num_reached)

    def _note(self, method: str, proposal: Proposal, row: _Row, sequence: Sequence) -> None:
        tokens = proposal.tokens[: self._max_tokens]
        end = next((i for i, token in enumerate(tokens) if not 0 <= token < self._vocab_size), len(tokens))
        if not end:
            return
        factor = row.acceptance[method].factor if method in row.acceptance else 1.0
        chance = self._acceptance[method].chance
        each = [min(1.0, chance(kind) * factor) for kind in proposal.kinds[:end]]
        chances = list(accumulate(each, mul))
        row.guesses[method] = _Guess(len(sequence.tokens), tokens[:end], proposal.kinds[:end], chances)

    def _try_one(self, chances: Seq[Seq[float]], max_tokens: int) -> list[int]:
        """Now and then a short draft of the likeliest row, though it does not seem to pay."""
        lengths = [0] * len(chances)
        self._num_without += 1
        if self._num_without >= _TRY_EVERY:
            most, i = max(((row[0], i) for i, row in enumerate(chances) if row), default=(0.0, 0))
            if most > _TRY_ABOVE:
                lengths[i] = min(_TRIED, len(chances[i]), max_tokens)
                self._num_without = 0
        return lengths


def _promise(guess: tuple[str, _Guess]) -> float:
    """Of a method's guess: how many of its tokens are right, in the mean."""
    return sum(guess[1].chances)
