"""What is drafted in the steps of a replica, and what has come of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import MappingProxyType

from core.types.request import BRANCHES
from engine.kv.block_manager import BlockManager
from engine.scheduler.sequence import Sequence
from engine.spec_decode.asking import Asking
from engine.spec_decode.corpus import Corpus
from engine.spec_decode.draft import Draft, fork, take_room
from engine.spec_decode.draft_plan import BranchOffer, StepPrice, plan_drafts, plan_tree
from engine.spec_decode.ensemble import ENSEMBLE
from engine.spec_decode.guess import Guess, GuessedBranch
from engine.spec_decode.guesses import Guesses
from engine.spec_decode.histories import Histories
from engine.spec_decode.looks import Looks
from engine.spec_decode.ngram import Ngram
from engine.spec_decode.proposer import Computing, Proposer
from engine.spec_decode.purse import Purse
from engine.spec_decode.suffix import Suffix

_TRY_EVERY = 64  # looks of which nothing comes: prices are learnt from steps that draft
_TRIED = 3  # tokens of one row
_TRY_ABOVE = 0.5  # as likely as that they are right


@dataclass(eq=False, slots=True)
class DraftCounts:
    """Of one method, or of branches: drafted tokens, and those that were accepted, by place in their draft."""

    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)


class Speculation:
    """Owned by the step thread. Methods that look up guess also where nothing is drafted: what becomes of the row says
    how good they are, and costs no step. But where it is in vain they are not asked each time (`Looks`). Those that
    compute are asked where it pays (`Asking`)."""

    def __init__(
        self,
        methods: Mapping[str, Proposer],
        *,
        computing: Mapping[str, Computing] = MappingProxyType({}),
        max_tokens: int,
        vocab_size: int,
        may_branch: bool = True,
        may_pass_over: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """max_tokens: of a draft. Where there are several methods, for each row the one that promises most drafts, or
        all of them place by place. may_branch: else drafts are linear, for whoever wants to know what branches are
        worth. may_pass_over: else somebody looks at every row of every step, for whoever wants to know how often there
        is a guess, or does already. clock: see Asking."""
        every = [*methods, *computing]
        self.counts = {method: DraftCounts() for method in [*every, *[ENSEMBLE] * (len(every) > 1), BRANCHES]}
        self._methods = methods
        self._computing = computing
        self._max_tokens = max_tokens
        self._may_branch = may_branch
        self._may_pass_over = may_pass_over
        self._guesses = Guesses(every, computing, max_tokens=max_tokens, vocab_size=vocab_size)
        self._purse = Purse()
        self._asking = Asking(computing, self._guesses, self._purse, clock=clock)
        self._num_without = 0  # looks of which nothing came, since the last trial
        self._looks = Looks()

    @classmethod
    def of(
        cls,
        method: str,
        *,
        max_tokens: int,
        vocab_size: int,
        computing: Mapping[str, Computing] = MappingProxyType({}),
        corpus: Corpus | None = None,
        may_branch: bool = True,
        may_pass_over: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Speculation:
        """method: `ngram`, `suffix`, one of `computing`, or `auto`: `suffix` and these. corpus: None, its own."""
        histories, known = Histories(), dict[str, Proposer]()
        if method == "ngram":
            known[method] = Ngram(histories)
        elif method in ("suffix", "auto"):  # whose places are those of `ngram`, and more
            known["suffix"] = Suffix(histories, corpus or Corpus())
        return cls(
            known,
            computing={name: proposer for name, proposer in computing.items() if method in (name, "auto")},
            max_tokens=max_tokens,
            vocab_size=vocab_size,
            may_branch=may_branch,
            may_pass_over=may_pass_over,
            clock=clock,
        )

    def draft(
        self, rows: Seq[Sequence], price_of: Callable[[], StepPrice], *, max_tokens: int, blocks: BlockManager
    ) -> dict[Sequence, Draft]:
        """For rows of a step that are about to compute their last tokens; all together at most so many tokens. Blocks
        for them are taken. price_of: asked where somebody looks."""
        if not (looked := self._look_up(rows)):
            self._pass_over()
            return {}
        price = price_of()
        self._purse.earn(price.plain)
        most = [self._most(row) for row in looked]
        guessed = [self._guesses.best(row) for row in looked]
        chances = _chances(guessed, most)
        if ask := self._asking.plan(looked, most, chances, price, max_tokens):
            self._asking.carry_out(ask, looked)
            guessed = [self._guesses.best(row) for row in looked]
            chances = _chances(guessed, most)
        self._asking.looked()
        if not any(chances):  # mostly, where a method has nothing to say
            self._looks.brought((row, 0) for row in looked)
            self._num_without += 1
            return {}
        branches = self._branches(looked, guessed, most)
        offers = [_offer(i, looked[i], branch, price) for i, branch in branches]
        lengths, taken_of = plan_tree(chances, offers, len(rows), price, max_tokens)
        self._looks.brought(zip(looked, lengths, strict=True))
        if not any(lengths):
            lengths = self._try_one(chances, price, max_tokens)
        drafts: dict[Sequence, Draft] = {}
        for row, length, (method, guess) in zip(looked, lengths, guessed, strict=True):
            if guess and length:
                num_blocks = len(row.blocks)
                if taken := take_room(row, length, blocks):
                    drafts[row] = Draft(tokens=guess.tokens[:taken], num_blocks=num_blocks, method=method)
        for (i, branch), length in zip(branches, taken_of, strict=True):
            draft = drafts.get(looked[i])
            if length and draft and branch.place <= len(draft.tokens):
                if forked := fork(looked[i], branch.place, branch.tokens[:length], blocks):
                    draft.branches.append(forked)
        return drafts

    def awaits(self, rows: Seq[Sequence], price_of: Callable[[], StepPrice], *, max_tokens: int) -> bool:
        """Whether something would be drafted for them, or asked, as they are now. Asks nobody who computes."""
        if not (looked := self._look_up(rows)):
            self._pass_over()
            return False
        price = price_of()
        most = [self._most(row) for row in looked]
        chances = _chances([self._guesses.best(row) for row in looked], most)
        lengths = plan_drafts(chances, len(rows), price, max_tokens)
        self._looks.brought(zip(looked, lengths, strict=True))
        if any(lengths) or self._asking.plan(looked, most, chances, price, max_tokens):
            return True
        self._purse.earn(price.plain)
        self._asking.looked()
        return False

    def has_guess(self, row: Sequence) -> bool:
        """Whether anybody has said what follows, the last time that somebody looked."""
        return self._guesses.has_any(row)

    def verified(self, draft: Draft, chosen: Seq[int]) -> None:
        """A step has shown what its sequence goes on with."""
        counts, right = self.counts[draft.method], draft.right(chosen)
        counts.drafted.update(range(len(draft.tokens)))
        counts.accepted.update(range(right.num_first))
        counts = self.counts[BRANCHES]
        for branch in draft.branches:
            counts.drafted.update(range(branch.place, branch.place + len(branch.tokens)))
        if right.branch:
            counts.accepted.update(range(right.branch.place, right.branch.place + right.num_then))

    def finished(self, sequence: Sequence) -> None:
        """It has its last token."""
        for proposer in (*self._methods.values(), *self._computing.values()):
            proposer.finished(sequence)
        self._asking.finished(sequence)

    def forget(self, sequence: Sequence) -> None:
        """It gets no more tokens here, or none for now."""
        self._asking.forget(sequence)

    def take_asking_s(self) -> float:
        """How long the step thread has waited since the last call for methods that compute."""
        return self._asking.take_spent_s()

    def _most(self, row: Sequence) -> int:
        """Tokens that may be drafted for a row: the step chooses one more, and it gets none beyond its end."""
        return max(0, min(self._max_tokens, row.most_tokens - len(row.tokens), row.ends_at - len(row.tokens) - 1))

    def _look_up(self, rows: Seq[Sequence]) -> Seq[Sequence]:
        """See to it that there are guesses of the tokens that sequences have now, by those who look up, where a look is
        due. Returns the rows of which no older guess is left: those; where those who compute may be asked, all."""
        due: Seq[Sequence] = ()
        if self._methods:
            due = self._looks.due(rows) if self._may_pass_over else rows
        looked = rows if self._asking.is_due(rows) else due
        self._guesses.learn(looked)
        for method, proposer in self._methods.items():
            if asked := [row for row in due if self._guesses.is_missing(method, row)]:
                for row, proposal in zip(asked, proposer.propose(asked, self._max_tokens), strict=True):
                    self._guesses.note(method, row, proposal)
        return looked

    def _pass_over(self) -> None:
        """A step for which nobody looks."""
        self._purse.earn_later()
        self._asking.looked()

    def _branches(self, rows: Seq[Sequence], guessed: Seq[_Best], most: Seq[int]) -> list[tuple[int, GuessedBranch]]:
        """Of the best guess for each, as far as they may be drafted, and the row whose they are. None of a row whose
        table somebody else reads: another block would have the place of its last."""
        found: list[tuple[int, GuessedBranch]] = []
        if not self._may_branch:
            return found
        for i, (row, (_, guess), limit) in enumerate(zip(rows, guessed, most, strict=True)):
            for branch in guess.branches if guess and not row.keeps_blocks else ():
                if (length := limit - branch.place) > 0:
                    found.append((i, branch._replace(tokens=branch.tokens[:length], chances=branch.chances[:length])))
        return found

    def _try_one(self, chances: Seq[Seq[float]], price: StepPrice, max_tokens: int) -> list[int]:
        """Now and then a short draft of the likeliest row, though it does not seem to pay: from the purse, as if
        nothing of it were right."""
        lengths = [0] * len(chances)
        self._num_without += 1
        if self._num_without >= _TRY_EVERY:
            most, i = max(((row[0], i) for i, row in enumerate(chances) if row), default=(0.0, 0))
            num_tokens = min(_TRIED, len(chances[i]), max_tokens)
            cost = max(0.0, price.step(num_tokens) - price.plain)
            if most > _TRY_ABOVE and self._purse.can_pay(cost):
                self._purse.pay(cost)
                lengths[i] = num_tokens
                self._num_without = 0
        return lengths


_Best = tuple[str, Guess | None]  # of a row: whose guess, and the guess


def _chances(guessed: Seq[_Best], most: Seq[int]) -> list[Seq[float]]:
    """Of the best guess for each, as far as it may be drafted."""
    return [guess.chances[:limit] if guess else () for (_, guess), limit in zip(guessed, most, strict=True)]


def _offer(number: int, row: Sequence, branch: GuessedBranch, price: StepPrice) -> BranchOffer:
    num_again = row.num_missing + branch.place
    return BranchOffer(number, branch.place, branch.chances, num_again, price.fork(len(row.tokens)))
