"""Proposers: look-ups of the product, fakes of any quality, a replica that drafts with them; drafts of given rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from torch import Tensor

from core.types.request import SequenceRequest
from engine.kv.block_manager import BlockManager
from engine.runner.runner import ModelRunner
from engine.scheduler.sequence import Sequence
from engine.spec_decode.heads.head_row import HeadLogits, HeadRow
from engine.spec_decode.proposer import Proposal, Proposer
from engine.spec_decode.speculation import Speculation
from engine.spec_decode.step_cost import ProposalCost, StepCost
from engine.spec_decode.suffix import Corpus, Suffix
from engine.spec_decode.verify import Draft

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

    def rest(self, num_first: int | None) -> None:
        self.num_first = num_first

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence)

    def _take(self, depth: int, num_tokens: int) -> None:
        seconds = self._price.seconds(depth, num_tokens)
        self.spent_s += seconds
        self._clock.now += seconds


def right(tokens: Seq[int], max_tokens: int) -> list[int]:
    """Return the tokens with which a row of a Replica continues."""
    grown = [tokens[-1]]
    for _ in range(max_tokens):
        grown.append((grown[-1] * 7 + 3) % 50)
    return grown[1:]


def wrong(tokens: Seq[int], max_tokens: int) -> list[int]:
    return [(token + 1) % 50 for token in right(tokens, max_tokens)]


def nothing(tokens: Seq[int], max_tokens: int) -> list[int]:
    return []


def growing_row(tokens: Seq[int], *, ends_at: int = 100_000) -> Sequence:
    row = sequence_of(tokens)
    row.ends_at = ends_at
    return row


class Replica:
    """Rows that continue by `right`, timed by a fake clock. Each is replaced after `num_tokens` tokens."""

    def __init__(
        self,
        num_rows: int = 1,
        *,
        clock: FakeClock | None = None,
        num_tokens: int = 100_000,
        ends_at: int = 100_000,
        max_tokens: int = 8,
        backs_off: bool = True,
        **methods: object,
    ) -> None:
        """methods: proposers; functions are the guesses of fakes that look up. max_tokens: of a draft."""
        self.clock = clock or FakeClock()
        models = {name: one for name, one in methods.items() if isinstance(one, FakeModelProposer)}
        others = {
            name: one if isinstance(one, FakeProposer) else FakeProposer(one)  # type: ignore[arg-type]
            for name, one in methods.items()
            if name not in models
        }
        self.speculation = Speculation(
            others, models=models, max_tokens=max_tokens, vocab_size=50, clock=self.clock, backs_off=backs_off
        )
        self.blocks = BlockManager(8000)
        self.rows = [growing_row([number], ends_at=ends_at) for number in range(num_rows)]
        self.num_tokens, self.seconds = 0, 0.0
        self._replaced_after, self._models = num_tokens, list(models.values())

    def step(self, price: StepCost, *, room: int = 64) -> dict[Sequence, Draft]:
        """Run a step; return its drafts."""
        begin = self.clock.now
        drafts = self.speculation.draft(self.rows, lambda: price, max_tokens=room, blocks=self.blocks)
        self.clock.now += price.step(sum(len(draft.tokens) for draft in drafts.values()))
        for row in self.rows:
            draft = drafts.get(row)
            chosen = right(row.tokens, 1)
            for drafted in draft.tokens if draft else ():
                if drafted != chosen[-1]:
                    break
                chosen += right(chosen, 1)
            row.tokens += chosen
            self.num_tokens += len(chosen)
            row.num_computed = len(row.tokens) - 1
            if draft:
                draft.give_back(row, self.blocks, num_right=0)
                self.speculation.verified(draft, chosen)
            row.release(self.blocks)
        for model in self._models:
            model.stepped(self.rows)
        self.rows = [
            row if row.num_generated < self._replaced_after else growing_row(row.tokens[:1]) for row in self.rows
        ]
        self.seconds += self.clock.now - begin
        return drafts

    def num_drafted(self, price: StepCost, *, room: int = 64) -> int:
        return sum(len(draft.tokens) for draft in self.step(price, room=room).values())

    def steps(self, count: int, price: StepCost) -> float:
        """Return the tokens per second over `count` steps, relative to steps without drafts."""
        tokens, seconds = self.num_tokens, self.seconds
        for _ in range(count):
            self.step(price)
        return (self.num_tokens - tokens) / (self.seconds - seconds) / (len(self.rows) / price.plain)


class Recorded:
    """Proposer that records another one's drafts by the tokens of the sequence. num_tokens: of every draft."""

    def __init__(self, proposer: Proposer, num_tokens: int | None = None) -> None:
        self._proposer, self._num_tokens = proposer, num_tokens
        self.drafts: dict[tuple[int, ...], list[int]] = {}

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        proposals = self._proposer.propose(sequences, self._num_tokens or max_tokens)
        for sequence, proposal in zip(sequences, proposals, strict=True):
            self.drafts[tuple(sequence.tokens)] = list(proposal.tokens)
        return proposals

    def finished(self, sequence: Sequence) -> None:
        pass


def draft_logits(
    runner: Any, rows: Seq[HeadRow], num_places: int, token_of: Callable[[int], int] = lambda place: 11 + place
) -> list[Tensor]:
    """Return the logits (R, D) at each place of a draft whose tokens are given, the same for every row."""
    found: list[Tensor] = []

    def choose(logits: HeadLogits, known: Seq[int], place: int) -> list[int]:
        assert list(known) == [*range(len(rows))]
        found.append(logits.values_RD.clone())
        return [token_of(place)] * len(rows)

    runner.draft(rows, num_places, choose)
    return found


def likeliest_draft(runner: ModelRunner, row: HeadRow, num_places: int) -> list[int]:
    drafted: list[int] = []

    def choose(logits: HeadLogits, known: Seq[int], place: int) -> list[int]:
        best = logits.values_RD[0].argmax()
        drafted.append(int(best if logits.ids_D is None else logits.ids_D[best]))
        return drafted[-1:]

    runner.draft([row], num_places, choose)
    return drafted
