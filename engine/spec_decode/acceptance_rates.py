"""Running acceptance rates of proposers, learned from the tokens that actually followed each proposal."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from engine.scheduler.sequence import Sequence
from engine.spec_decode.proposer import NUM_KINDS, Proposal

_PRIOR = 4.0  # tokens; weight of the prior rates
_MEMORY, _MEMORY_OF_MEAN = 256.0, 32.0  # tokens of a kind; beyond that, its counts are halved
# Kinds of look-ups grow with the length of the match, so longer matches start with a higher rate.
_PRIOR_BY_KIND = [(1 + kind % 16) / (5 + kind % 16) for kind in range(NUM_KINDS)]
_PRIOR_OF_MEAN = 0.2  # low, so that only trials, whose time is bounded, show whether calls of a model pay
_KEEP = 0.9  # weight of a sequence's past at each new proposal
_MEMORY_OF_YIELD = 512.0  # rows; older ones count little
_MIN_DRAFTED = 1e-6  # tokens; a smaller mean is left over from drafts long ago
_BOUNDS = 0.05, 1.25  # of a sequence's factor; unpredictable sequences soon stop drafting


class AcceptanceRate:
    """Share of accepted tokens by kind, given that all earlier tokens of the proposal were right."""

    def __init__(self, prior: Seq[float] = _PRIOR_BY_KIND, memory: float = _MEMORY) -> None:
        self._memory = memory
        self._reached = [_PRIOR] * len(prior)
        self._right = [_PRIOR * rate for rate in prior]
        self.rates = list(prior)  # by kind

    def observe(self, kinds: Seq[int], num_right: int) -> None:
        """Count a proposal. kinds: those of its judged tokens. num_right: number of leading ones that were right."""
        for place, kind in enumerate(kinds):
            self._reached[kind] += 1.0
            self._right[kind] += place < num_right
            if self._reached[kind] > self._memory:
                self._reached[kind] /= 2
                self._right[kind] /= 2
            self.rates[kind] = self._right[kind] / self._reached[kind]


class SequenceFactor:
    """Acceptance of one method on one sequence, relative to the rates learned over all sequences."""

    def __init__(self) -> None:
        self._expected = self._right = 0.0
        self.value = 1.0

    def observe(self, expected: float, num_right: int) -> None:
        """Count a proposal by the expected and the actual number of right tokens."""
        self._expected = self._expected * _KEEP + expected
        self._right = self._right * _KEEP + num_right
        low, high = _BOUNDS
        self.value = min(high, max(low, (self._right + 1.0) / (self._expected + 1.0)))


@dataclass(eq=False, slots=True)
class RatedProposal:
    """Proposal for a sequence as it is now. chances[i]: probability that tokens 0 to i are all right."""

    method: str
    start: int  # position of the first token
    tokens: Seq[int]
    kinds: Seq[int]
    chances: Seq[float]


@dataclass(eq=False, slots=True)
class _Row:
    proposals: dict[str, RatedProposal] = field(default_factory=dict)  # by method
    factors: dict[str, SequenceFactor] = field(default_factory=dict)


class AcceptanceTracker:
    """Current proposals of sequences, and the acceptance rates learned from earlier ones.

    Owned by the step thread. A proposal updates the rates once its sequence has grown, even if it was never drafted.
    """

    def __init__(self, methods: Iterable[str], *, max_tokens: int, vocab_size: int) -> None:
        """max_tokens: maximum length of a proposal."""
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._by_kind = {method: AcceptanceRate() for method in methods}
        self._means = {method: AcceptanceRate([_PRIOR_OF_MEAN], _MEMORY_OF_MEAN) for method in self._by_kind}
        self._rows: dict[Sequence, _Row] = {}

    def learn(self, sequences: Iterable[Sequence]) -> None:
        """Judge and drop the proposals for sequences that have grown since. Call before any other method."""
        for sequence in sequences:
            row = self._row(sequence)
            for method in [name for name, one in row.proposals.items() if one.start != len(sequence.tokens)]:
                self._judge(row, row.proposals.pop(method), sequence.tokens)

    def note(self, method: str, sequence: Sequence, proposal: Proposal) -> None:
        """Rate and keep a proposal for the sequence as it is now."""
        tokens = self._valid(proposal.tokens)
        if not tokens:
            return
        row, rates = self._row(sequence), self._by_kind[method].rates
        factor = row.factors[method].value if method in row.factors else 1.0
        kinds = proposal.kinds[: len(tokens)]
        chances = list(accumulate([min(1.0, rates[kind] * factor) for kind in kinds], mul))
        row.proposals[method] = RatedProposal(method, len(sequence.tokens), tokens, kinds, chances)

    def best(self, sequence: Sequence) -> RatedProposal | None:
        """Return the proposal with the most expected tokens, if there is any."""
        proposals = self._row(sequence).proposals
        return max(proposals.values(), key=lambda one: sum(one.chances), default=None)

    def is_missing(self, method: str, sequence: Sequence) -> bool:
        return method not in self._row(sequence).proposals

    def has_any(self, sequence: Sequence) -> bool:
        row = self._rows.get(sequence)
        return row is not None and bool(row.proposals)

    def forget(self, sequence: Sequence) -> None:
        self._rows.pop(sequence, None)

    def expected(self, method: str, sequence: Sequence, num_tokens: int) -> list[float]:
        """Predict the chances of a method's next proposal, from its mean rate alone."""
        factors = self._row(sequence).factors
        factor = factors[method].value if method in factors else 1.0
        rate = min(1.0, self._means[method].rates[0] * factor)
        return [rate**place for place in range(1, num_tokens + 1)]

    def _valid(self, tokens: Seq[int]) -> Seq[int]:
        """Cut the tokens at the length limit and before the first id outside the vocabulary."""
        tokens = tokens[: self._max_tokens]
        if tokens and min(tokens) >= 0 and max(tokens) < self._vocab_size:  # the common case
            return tokens
        return tokens[: next((i for i, token in enumerate(tokens) if not 0 <= token < self._vocab_size), len(tokens))]

    def _row(self, sequence: Sequence) -> _Row:
        row = self._rows.get(sequence)
        if row is None:
            row = self._rows[sequence] = _Row()
        return row

    def _judge(self, row: _Row, rated: RatedProposal, tokens: Seq[int]) -> None:
        known = tokens[rated.start : rated.start + len(rated.tokens)]
        num_right = next((i for i, token in enumerate(known) if token != rated.tokens[i]), len(known))
        kinds = rated.kinds[: min(num_right + 1, len(known))]
        by_kind = self._by_kind[rated.method]
        factor = row.factors.setdefault(rated.method, SequenceFactor())
        factor.observe(sum(by_kind.rates[kind] for kind in kinds), num_right)
        by_kind.observe(kinds, num_right)
        self._means[rated.method].observe([0] * len(kinds), num_right)


class RowYield:
    """Running mean of tokens gained and drafted per decoding row of a step. Owned by the step thread."""

    def __init__(self) -> None:
        self._rows = self._tokens = self._drafted = 0.0

    def add(self, num_rows: int, *, num_tokens: int, num_drafted: int) -> None:
        """Count a step whose decoding rows gained num_tokens tokens and verified num_drafted draft tokens."""
        keep = max(0.0, 1 - num_rows / _MEMORY_OF_YIELD)
        self._rows = self._rows * keep + num_rows
        self._tokens = self._tokens * keep + num_tokens
        self._drafted = self._drafted * keep + num_drafted

    @property
    def tokens_per_row(self) -> float:
        """0 before the first row."""
        return self._tokens / self._rows if self._rows else 0.0

    @property
    def drafted_per_row(self) -> float:
        drafted = self._drafted / self._rows if self._rows else 0.0
        return drafted if drafted >= _MIN_DRAFTED else 0.0
