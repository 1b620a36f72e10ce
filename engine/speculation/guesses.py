"""What methods have said of the rows of a replica, and how often that was right."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from weakref import WeakKeyDictionary

from engine.sequence import Sequence
from engine.speculation.acceptance import Acceptance, RowAcceptance
from engine.speculation.proposer import NUM_KINDS, Proposal

ENSEMBLE = "ensemble"  # several methods, place by place

# Of those that compute, before they are asked: so much is risked, and where they are hardly ever asked, so little is
# remembered.
_BELIEVED_BY_PLACE = [0.7] * NUM_KINDS
_MEMORY_BY_PLACE = 48.0  # tokens
_BOUNDS_BY_PLACE = 0.25, 2.0  # of what one request is beside others, of which nothing else is known


@dataclass(eq=False, slots=True)
class Guess:
    """What a method has said of a row: until the row's own tokens have shown how much of it was right."""

    start: int  # position of its first token
    tokens: Seq[int]
    kinds: Seq[int]
    chances: Seq[float]  # of each, that it and those before it are right


@dataclass(eq=False, slots=True)
class _Row:
    guesses: dict[str, Guess] = field(default_factory=dict)  # by method
    acceptance: dict[str, RowAcceptance] = field(default_factory=dict)  # beside what was to be expected of the kinds
    promises: dict[str, RowAcceptance] = field(default_factory=dict)  # and of the places


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
        self._rows: WeakKeyDictionary[Sequence, _Row] = WeakKeyDictionary()

    def best(self, sequence: Sequence) -> tuple[str, Guess | None]:
        """The guess that promises most tokens, and whose it is: one method's, or ENSEMBLE's, which at each place takes
        the token that is likeliest to be right, by whoever has agreed with all before it."""
        guesses = self._row(sequence).guesses
        if len(guesses) < 2:
            return max(guesses.items(), default=("", None))
        best = max(guesses.items(), key=_promise)
        together = ENSEMBLE, _together(list(guesses.values()))
        return together if _promise(together) > _promise(best) else best

    def learn(self, sequences: Iterable[Sequence]) -> None:
        """From what was said of fewer tokens than they have now. Before anything else is asked of them."""
        for sequence in sequences:
            row = self._row(sequence)
            for method in [name for name, guess in row.guesses.items() if guess.start != len(sequence.tokens)]:
                self._learn(method, row, sequence)

    def is_missing(self, method: str, sequence: Sequence) -> bool:
        """Whether the method has said nothing of the tokens that the sequence has now."""
        return method not in self._row(sequence).guesses

    def promised(self, method: str, sequence: Sequence, num_tokens: int) -> list[float]:
        """What the method's next guess is worth: of each of its tokens, by place, the chance that it and all before it
        are right."""
        acceptance, row = self._by_place[method], self._row(sequence)
        factor = row.promises[method].factor if method in row.promises else 1.0
        each = (min(1.0, acceptance.chance(_kind_of(place)) * factor) for place in range(num_tokens))
        return list(accumulate(each, mul))

    def note(self, method: str, sequence: Sequence, proposal: Proposal) -> None:
        """The method has said this of the tokens that the sequence has now."""
        tokens = proposal.tokens[: self._max_tokens]
        end = next((i for i, token in enumerate(tokens) if not 0 <= token < self._vocab_size), len(tokens))
        if not end:
            return
        row = self._row(sequence)
        factor = row.acceptance[method].factor if method in row.acceptance else 1.0
        chance = self._acceptance[method].chance
        each = [min(1.0, chance(kind) * factor) for kind in proposal.kinds[:end]]
        chances = list(accumulate(each, mul))
        row.guesses[method] = Guess(len(sequence.tokens), tokens[:end], proposal.kinds[:end], chances)

    def _row(self, sequence: Sequence) -> _Row:
        row = self._rows.get(sequence)
        if row is None:
            row = self._rows[sequence] = _Row()
        return row

    def _learn(self, method: str, row: _Row, sequence: Sequence) -> None:
        """From what has become of the last guess, as far as the row has come since then."""
        guess = row.guesses.pop(method)
        known = sequence.tokens[guess.start : guess.start + len(guess.tokens)]
        num_right = next((i for i, token in enumerate(known) if token != guess.tokens[i]), len(known))
        num_reached = min(num_right + 1, len(known))
        kinds = guess.kinds[:num_reached]
        acceptance = row.acceptance.setdefault(method, RowAcceptance())
        acceptance.saw(sum(map(self._acceptance[method].chance, kinds)), num_right)
        self._acceptance[method].saw(kinds, num_right, num_reached)
        if by_place := self._by_place.get(method):
            places = [_kind_of(place) for place in range(num_reached)]
            row.promises.setdefault(method, RowAcceptance(_BOUNDS_BY_PLACE)).saw(
                sum(map(by_place.chance, places)), num_right
            )
            by_place.saw(places, num_right, num_reached)


def _together(guesses: Seq[Guess]) -> Guess:
    """Their kinds are left out: each method learns from its own guess."""
    tokens: list[int] = []
    chances: list[float] = []
    agreeing = list(guesses)
    while going_on := [guess for guess in agreeing if len(guess.tokens) > len(tokens)]:
        place = len(tokens)
        before = [guess.chances[place - 1] if place else 1.0 for guess in going_on]
        each = [
            guess.chances[place] / chance if chance else 0.0 for guess, chance in zip(going_on, before, strict=True)
        ]
        likeliest = max(range(len(each)), key=lambda i: each[i])
        tokens.append(going_on[likeliest].tokens[place])
        chances.append((chances[-1] if chances else 1.0) * each[likeliest])
        agreeing = [guess for guess in going_on if guess.tokens[place] == tokens[-1]]
    return Guess(guesses[0].start, tokens, (), chances)


def _kind_of(place: int) -> int:
    return min(place, NUM_KINDS - 1)


def _promise(guess: tuple[str, Guess]) -> float:
    """Of a method's guess: how many of its tokens are right, in the mean."""
    return sum(guess[1].chances)
