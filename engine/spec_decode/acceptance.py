"""Running acceptance rates of proposers, learned from the actual next tokens of sequences, drafted or not."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from weakref import WeakKeyDictionary

from engine.scheduler.sequence import Sequence
from engine.spec_decode.proposer import NUM_KINDS, Proposal

_PRIOR = 4.0  # tokens; weight of the prior rates
_MEMORY = 256.0  # tokens of a kind; beyond that the older half counts half
# Kinds of look-ups grow with the length of the match, so longer matches start with a higher rate.
_PRIOR_BY_KIND = [(1 + kind % 16) / (5 + kind % 16) for kind in range(NUM_KINDS)]
# Rates of model proposers by place, used before they are called. The first one is low, so that only trials, which
# have a budget, show whether calls pay; later places are rarely reached by trials, so their prior is optimistic.
_PRIOR_BY_PLACE = [0.2] + [0.7] * (NUM_KINDS - 1)
_MEMORY_BY_PLACE = 48.0

_FACTOR_PRIOR = 1.0  # tokens; weight of a factor of 1
_FACTOR_KEEP = 0.9  # weight of the past at each new proposal
_FACTOR_BOUNDS = 0.05, 1.25  # low, so that a sequence that is never guessed is soon left alone
_FACTOR_BOUNDS_BY_PLACE = 0.25, 2.0


class AcceptanceRate:
    """Share of accepted tokens by kind, given that all earlier tokens of the proposal were right."""

    def __init__(self, prior: Seq[float] = _PRIOR_BY_KIND, memory: float = _MEMORY) -> None:
        self._memory = memory
        self._reached = [_PRIOR] * NUM_KINDS
        self._right = [_PRIOR * rate for rate in prior]
        self.rates = list(prior)  # by kind

    def observe(self, kinds: Seq[int], num_right: int, num_reached: int) -> None:
        """Count a proposal: num_reached tokens were judged, the first num_right of them right."""
        for place in range(num_reached):
            kind = kinds[place]
            self._reached[kind] += 1.0
            self._right[kind] += place < num_right
            if self._reached[kind] > self._memory:
                self._reached[kind] /= 2
                self._right[kind] /= 2
            self.rates[kind] = self._right[kind] / self._reached[kind]


class SequenceFactor:
    """Acceptance of one method on one sequence, relative to the rates learned over all sequences."""

    def __init__(self, bounds: tuple[float, float] = _FACTOR_BOUNDS) -> None:
        self._bounds = bounds
        self._expected = self._right = 0.0

    def observe(self, expected: float, num_right: int) -> None:
        """Count a proposal: the expected and the real number of right tokens among those judged."""
        self._expected = self._expected * _FACTOR_KEEP + expected
        self._right = self._right * _FACTOR_KEEP + num_right

    @property
    def value(self) -> float:
        low, high = self._bounds
        return min(high, max(low, (self._right + _FACTOR_PRIOR) / (self._expected + _FACTOR_PRIOR)))


@dataclass(eq=False, slots=True)
class RatedProposal:
    """Proposal for the tokens that a sequence has now. chances: by token, that it and all before it are right."""

    method: str
    start: int  # position of the first token
    tokens: Seq[int]
    kinds: Seq[int]
    chances: Seq[float]

    def outcome(self, tokens: Seq[int]) -> tuple[int, int]:
        """Return (right tokens, judged tokens) where the sequence has these tokens."""
        known = tokens[self.start : self.start + len(self.tokens)]
        num_right = next((i for i, token in enumerate(known) if token != self.tokens[i]), len(known))
        return num_right, min(num_right + 1, len(known))


class _Method:
    def __init__(self, *, is_model: bool) -> None:
        self.by_kind = AcceptanceRate()
        self.by_place = AcceptanceRate(_PRIOR_BY_PLACE, _MEMORY_BY_PLACE) if is_model else None


@dataclass(eq=False, slots=True)
class _Row:
    proposals: dict[str, RatedProposal] = field(default_factory=dict)  # by method
    factors: dict[str, SequenceFactor] = field(default_factory=dict)
    place_factors: dict[str, SequenceFactor] = field(default_factory=dict)


class AcceptanceTracker:
    """Current proposals of sequences, and the acceptance rates learned from earlier ones.

    Owned by the step thread. A proposal teaches as soon as its sequence has grown, whether it was drafted or not.
    """

    def __init__(self, methods: Iterable[str], models: Collection[str], *, max_tokens: int, vocab_size: int) -> None:
        """models: methods that need an estimate before they are called. max_tokens: of a proposal."""
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._methods = {method: _Method(is_model=method in models) for method in methods}
        self._rows: WeakKeyDictionary[Sequence, _Row] = WeakKeyDictionary()

    def learn(self, sequences: Iterable[Sequence]) -> None:
        """Judge and drop the proposals for sequences that have grown since. Call before any other method."""
        for sequence in sequences:
            row = self._row(sequence)
            for method in [name for name, one in row.proposals.items() if one.start != len(sequence.tokens)]:
                self._learn(row, row.proposals.pop(method), sequence.tokens)

    def note(self, method: str, sequence: Sequence, proposal: Proposal) -> None:
        """Rate and keep a proposal for the tokens that the sequence has now."""
        tokens = self._valid(proposal.tokens)
        if not tokens:
            return
        row, rates = self._row(sequence), self._methods[method].by_kind.rates
        factor = row.factors[method].value if method in row.factors else 1.0
        kinds = proposal.kinds[: len(tokens)]
        chances = list(accumulate([min(1.0, rates[kind] * factor) for kind in kinds], mul))
        row.proposals[method] = RatedProposal(method, len(sequence.tokens), tokens, kinds, chances)

    def best(self, sequence: Sequence) -> RatedProposal | None:
        """Return the proposal with the most expected tokens, if there is any."""
        proposals = self._row(sequence).proposals
        return max(proposals.values(), key=lambda one: sum(one.chances), default=None)

    def first_token(self, method: str, sequence: Sequence) -> int | None:
        """Return the first proposed token of this method, if there is any."""
        proposal = self._row(sequence).proposals.get(method)
        return proposal.tokens[0] if proposal else None

    def is_missing(self, method: str, sequence: Sequence) -> bool:
        return method not in self._row(sequence).proposals

    def has_any(self, sequence: Sequence) -> bool:
        return bool(self._row(sequence).proposals)

    def first_rate(self, method: str) -> float:
        """Return the acceptance rate of the first token of a model method, over all sequences."""
        by_place = self._methods[method].by_place
        assert by_place
        return by_place.rates[0]

    def expected(self, method: str, sequence: Sequence, num_tokens: int) -> list[float]:
        """Predict the acceptance of a model method's next proposal, by place, from learned rates alone."""
        by_place, factors = self._methods[method].by_place, self._row(sequence).place_factors
        assert by_place
        factor = factors[method].value if method in factors else 1.0
        rates = (min(1.0, by_place.rates[min(place, NUM_KINDS - 1)] * factor) for place in range(num_tokens))
        return list(accumulate(rates, mul))

    def _valid(self, tokens: Seq[int]) -> Seq[int]:
        """Cut at the length limit and before the first id outside the vocabulary."""
        tokens = tokens[: self._max_tokens]
        if tokens and min(tokens) >= 0 and max(tokens) < self._vocab_size:  # the common case
            return tokens
        return tokens[: next((i for i, token in enumerate(tokens) if not 0 <= token < self._vocab_size), len(tokens))]

    def _row(self, sequence: Sequence) -> _Row:
        row = self._rows.get(sequence)
        if row is None:
            row = self._rows[sequence] = _Row()
        return row

    def _learn(self, row: _Row, rated: RatedProposal, tokens: Seq[int]) -> None:
        name, method = rated.method, self._methods[rated.method]
        num_right, num_reached = rated.outcome(tokens)
        kinds = rated.kinds[:num_reached]
        factor = row.factors.setdefault(name, SequenceFactor())
        factor.observe(sum(method.by_kind.rates[kind] for kind in kinds), num_right)
        method.by_kind.observe(kinds, num_right, num_reached)
        if method.by_place:
            places = [min(place, NUM_KINDS - 1) for place in range(num_reached)]
            factor = row.place_factors.setdefault(name, SequenceFactor(_FACTOR_BOUNDS_BY_PLACE))
            factor.observe(sum(method.by_place.rates[place] for place in places), num_right)
            method.by_place.observe(places, num_right, num_reached)
