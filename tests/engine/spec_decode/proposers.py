"""Proposers for tests: the product's look-ups, and fakes of any quality."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from weakref import WeakSet

from core.types.request import SequenceRequest
from engine.scheduler.sequence import Sequence
from engine.spec_decode.proposer import Proposal, Proposer
from engine.spec_decode.step_cost import ProposalCost
from engine.spec_decode.suffix import Corpus, Suffix

OURS: Mapping[str, Callable[[], Proposer]] = {"ngram": lambda: Suffix(), "suffix": lambda: Suffix(Corpus())}


def sequence_of(
    tokens: Seq[int], *, num_prompt_tokens: int | None = None, tenant: str = "", salt: str = ""
) -> Sequence:
    count = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    request = SequenceRequest(id="r", token_ids=tuple(tokens), num_prompt_tokens=count, tenant=tenant, salt=salt)
    return Sequence(request, 0, model="m", block_size=8, max_context=4096)


class FakeProposer:
    """Proposer that returns `guess(tokens, max_tokens)`."""

    def __init__(self, guess: Callable[[Seq[int], int], Seq[int]]) -> None:
        self._guess = guess
        self.finished_with: list[list[int]] = []
        self.num_proposed = 0

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        self.num_proposed += len(sequences)
        guesses = [self._guess(sequence.tokens, max_tokens) for sequence in sequences]
        return [Proposal(tokens, [0] * len(tokens)) for tokens in guesses]

    def finished(self, sequence: Sequence) -> None:
        self.finished_with.append(list(sequence.tokens))


def propose(proposer: Proposer, sequence: Sequence, max_tokens: int) -> Proposal:
    """Return the proposal for one sequence alone."""
    (proposal,) = proposer.propose([sequence], max_tokens)
    return proposal


@dataclass
class FakeClock:
    """Clock set by the test, in seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class FakeModelProposer:
    """ModelProposer that returns what `guess` returns, takes time for it, and begins with nothing computed."""

    def __init__(
        self,
        guess: Callable[[Seq[int], int], Seq[int]],
        clock: FakeClock,
        price: ProposalCost,
        *,
        can_guess: Callable[[Sequence], bool] = lambda sequence: True,
    ) -> None:
        self._guess = guess
        self._clock = clock
        self._price = price
        self._can_guess = can_guess
        self._computed: dict[Sequence, int] = {}
        self.calls: list[tuple[int, int]] = []  # rows and depth of each call
        self.pieces: list[int] = []
        self.spent_s = 0.0
        self.finished_with: list[Sequence] = []
        self.forgotten: list[Sequence] = []
        self.num_first: int | None = None
        self._missed: WeakSet[Sequence] = WeakSet()

    @property
    def rests(self) -> bool:
        return self.num_first is not None

    def num_behind(self, sequence: Sequence) -> int | None:
        can_guess = sequence not in self._missed and self._can_guess(sequence)
        return len(sequence.tokens) - self._computed.get(sequence, 0) if can_guess else None

    def stepped(self, sequences: Seq[Sequence]) -> None:
        """Note that the sequences have grown. While resting, later tokens of an answer are missed for good."""
        if self.num_first is not None:
            self._missed.update(one for one in sequences if one.num_generated > self.num_first)

    def catch_up(self, sequence: Sequence, num_tokens: int) -> None:
        self._computed[sequence] = min(len(sequence.tokens) - 1, self._computed.get(sequence, 0) + num_tokens)
        self.pieces.append(num_tokens)
        self._take(0, num_tokens)

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        assert all(self._can_guess(sequence) for sequence in sequences)
        self._take(max_tokens, sum((self.num_behind(one) or 0) + max_tokens - 1 for one in sequences))
        self.calls.append((len(sequences), max_tokens))
        for sequence in sequences:
            self._computed[sequence] = len(sequence.tokens)
        guesses = [self._guess(sequence.tokens, max_tokens) for sequence in sequences]
        return [Proposal(tokens, [0] * len(tokens)) for tokens in guesses]

    def finished(self, sequence: Sequence) -> None:
        self.finished_with.append(sequence)

    def rest(self, num_first: int | None) -> None:
        self.num_first = num_first

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence)

    def _take(self, depth: int, num_tokens: int) -> None:
        seconds = self._price.seconds(depth, num_tokens)
        self.spent_s += seconds
        self._clock.now += seconds
