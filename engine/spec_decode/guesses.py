"""What methods have said of the rows of a replica, and how often that was right."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple
from weakref import WeakKeyDictionary

from engine.scheduler.sequence import Sequence
from engine.spec_decode.acceptance import Acceptance, Correction
from engine.spec_decode.ensemble import ENSEMBLE, together
from engine.spec_decode.guess import Guess, GuessedBranch
from engine.spec_decode.proposer import NUM_KINDS, Proposal, ProposedBranch

# Of those that compute, before they are asked: of the first place so little that only trials, which are paid for, show
# whether they are worth asking; of the others, which trials hardly ever reach, so much is risked. Where they are hardly
# ever asked, so little is remembered.
_BELIEVED_BY_PLACE = [0.2] + [0.7] * (NUM_KINDS - 1)
_MEMORY_BY_PLACE = 48.0  # tokens
_BOUNDS_BY_PLACE = 0.25, 2.0  # of what one request is beside others, of which nothing else is known

# Of several guesses the one that promises most is mostly one that promises too much.
_BOUNDS_OF_BEST = 0.05, 1.0
_KEEP_OF_BEST = 0.98

# Of the tokens with which branches begin. What follows one that is right is right as often as elsewhere.
_BELIEVED_OF_BRANCHES = [0.1] * NUM_KINDS


class _Best(NamedTuple):
    """Of several guesses."""

    method: str
    promised: Guess  # by its method
    believed: Guess  # corrected by what has come of those that were best


@dataclass(eq=False, slots=True)
class _Row:
    guesses: dict[str, Guess] = field(default_factory=dict)  # by method
    together: Guess | None = None  # of all of these, once somebody has asked
    best: _Best | None = None  # the same
    acceptance: dict[str, Correction] = field(default_factory=dict)  # beside what was to be expected of the kinds
    promises: dict[str, Correction] = field(default_factory=dict)  # and of the places


class Guesses:
    """Owned by the step thread. Whatever is guessed is learnt from, drafted or not: what becomes of the row says how
    good it was."""

    def __init__(self, methods: Iterable[str], by_place: Collection[str], *, max_tokens: int, vocab_size: int) -> None:
        """by_place: the methods of which it is to be known what they promise before they have said anything.
        max_tokens: of a guess."""
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._acceptance = {method: Acceptance() for method in methods}
        self._by_place = {method: Acceptance(_BELIEVED_BY_PLACE, _MEMORY_BY_PLACE) for method in by_place}
        self._branching = {method: Acceptance(_BELIEVED_OF_BRANCHES) for method in (*self._acceptance, ENSEMBLE)}
        self._of_best = Correction(_BOUNDS_OF_BEST, _KEEP_OF_BEST)
        self._rows: WeakKeyDictionary[Sequence, _Row] = WeakKeyDictionary()

    def best(self, sequence: Sequence) -> tuple[str, Guess | None]:
        """The guess that promises most tokens, and whose it is: one method's, or ENSEMBLE's (see `together`), by which
        it branches, too, where several have guessed. What has come of those that were best before corrects its chances;
        those of its branches are as they are."""
        row = self._row(sequence)
        if len(row.guesses) < 2:
            return max(row.guesses.items(), default=("", None))
        if row.best is None:
            method, promised = self._most_promising(row)
            factors = accumulate([self._of_best.factor] * len(promised.tokens), mul)
            believed = list(map(mul, promised.chances, factors))
            row.best = _Best(method, promised, promised.with_chances(believed))
        return row.best.method, row.best.believed

    def _most_promising(self, row: _Row) -> tuple[str, Guess]:
        """Of several guesses."""
        method, guess = max(row.guesses.items(), key=lambda item: sum(item[1].chances))
        if row.together is None:
            row.together = together(list(row.guesses.values()), self._branching[ENSEMBLE])
        if sum(row.together.chances) > sum(guess.chances):
            return ENSEMBLE, row.together
        if (guess.branches or row.together.branches) and row.together.says_what(guess):
            guess = Guess(guess.start, guess.tokens, guess.kinds, guess.chances, row.together.branches)
        return method, guess

    def learn(self, sequences: Iterable[Sequence]) -> None:
        """From what was said of fewer tokens than they have now. Before anything else is asked of them."""
        for sequence in sequences:
            row = self._row(sequence)
            if row.best and row.best.promised.start != len(sequence.tokens):
                num_right, num_reached = row.best.promised.outcome(sequence.tokens)
                self._of_best.saw(sum(row.best.promised.shares(num_reached)), num_right)
                row.best = None
            if row.together and row.together.start != len(sequence.tokens):
                self._learn_branches(ENSEMBLE, row.together, sequence)
                row.together = None
            for method in [name for name, guess in row.guesses.items() if guess.start != len(sequence.tokens)]:
                self._learn(method, row, sequence)

    def is_missing(self, method: str, sequence: Sequence) -> bool:
        """Whether the method has said nothing of the tokens that the sequence has now."""
        return method not in self._row(sequence).guesses

    def has_any(self, sequence: Sequence) -> bool:
        """Whether anybody has said what follows."""
        return bool(self._row(sequence).guesses)

    def promised(self, method: str, sequence: Sequence, num_tokens: int) -> list[float]:
        """What the method's next guess is worth: of each of its tokens, by place, the chance that it and all before it
        are right."""
        acceptance, row = self._by_place[method], self._row(sequence)
        factor = row.promises[method].factor if method in row.promises else 1.0
        each = (min(1.0, acceptance.chance(_kind_of(place)) * factor) for place in range(num_tokens))
        return list(accumulate(each, mul))

    def note(self, method: str, sequence: Sequence, proposal: Proposal) -> None:
        """The method has said this of the tokens that the sequence has now."""
        tokens = self._real(proposal.tokens)
        if not tokens:
            return
        row = self._row(sequence)
        factor = row.acceptance[method].factor if method in row.acceptance else 1.0
        each = self._acceptance[method].chances
        kinds = proposal.kinds[: len(tokens)]
        chances = list(accumulate([min(1.0, each[kind] * factor) for kind in kinds], mul))
        guess = Guess(len(sequence.tokens), tokens, kinds, chances)
        if proposal.branches:
            found = (self._branch(method, guess, proposed, factor) for proposed in proposal.branches)
            guess.branches = [branch for branch in found if branch]
        row.guesses[method] = guess
        row.together = row.best = None

    def _real(self, tokens: Seq[int]) -> Seq[int]:
        """As many as may be drafted, and of those the model's own."""
        tokens = tokens[: self._max_tokens]
        if tokens and min(tokens) >= 0 and max(tokens) < self._vocab_size:  # mostly
            return tokens
        return tokens[: next((i for i, token in enumerate(tokens) if not 0 <= token < self._vocab_size), len(tokens))]

    def _branch(self, method: str, guess: Guess, proposed: ProposedBranch, factor: float) -> GuessedBranch | None:
        place, tokens = proposed.place, self._real(proposed.tokens)
        if not 0 <= place < len(guess.tokens) or not tokens or tokens[0] == guess.tokens[place]:
            return None
        before, kind = guess.chances[place - 1] if place else 1.0, proposed.kinds[0]
        # Of all that may come next one comes.
        first = min(before * self._branching[method].chance(kind), before - guess.chances[place])
        chance = self._acceptance[method].chance
        then = (min(1.0, chance(kind) * factor) for kind in proposed.kinds[1 : len(tokens)])
        return GuessedBranch(place, tokens, kind, list(accumulate((first, *then), mul)))

    def _row(self, sequence: Sequence) -> _Row:
        row = self._rows.get(sequence)
        if row is None:
            row = self._rows[sequence] = _Row()
        return row

    def _learn(self, method: str, row: _Row, sequence: Sequence) -> None:
        """From what has become of the last guess, as far as the row has come since then."""
        guess = row.guesses.pop(method)
        self._learn_branches(method, guess, sequence)
        num_right, num_reached = guess.outcome(sequence.tokens)
        kinds = guess.kinds[:num_reached]
        acceptance = row.acceptance.setdefault(method, Correction())
        acceptance.saw(sum(map(self._acceptance[method].chance, kinds)), num_right)
        self._acceptance[method].saw(kinds, num_right, num_reached)
        if by_place := self._by_place.get(method):
            places = [_kind_of(place) for place in range(num_reached)]
            row.promises.setdefault(method, Correction(_BOUNDS_BY_PLACE)).saw(
                sum(map(by_place.chance, places)), num_right
            )
            by_place.saw(places, num_right, num_reached)

    def _learn_branches(self, method: str, guess: Guess, sequence: Sequence) -> None:
        """With what those begin that the row could have gone on with."""
        for branch in guess.branches:
            at = guess.start + branch.place
            is_reached = at < len(sequence.tokens) and sequence.tokens[guess.start : at] == list(
                guess.tokens[: branch.place]
            )
            if is_reached and branch.kind >= 0:
                self._branching[method].saw((branch.kind,), sequence.tokens[at] == branch.tokens[0], 1)


def _kind_of(place: int) -> int:
    return min(place, NUM_KINDS - 1)
