"""Proposers for tests: those of ours, and some that guess as badly, or as well, as can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from cluster.words.request import SequenceRequest
from engine.sequence import Sequence
from engine.speculation.corpus import Corpus
from engine.speculation.histories import Histories
from engine.speculation.ngram import Ngram
from engine.speculation.proposer import Proposal, Proposer
from engine.speculation.suffix import Suffix

OURS: Mapping[str, Callable[[], Proposer]] = {
    "ngram": lambda: Ngram(Histories()),
    "suffix": lambda: Suffix(Histories(), Corpus()),
}


def sequence_of(
    tokens: Seq[int], *, num_prompt_tokens: int | None = None, tenant: str = "", salt: str = ""
) -> Sequence:
    count = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    request = SequenceRequest(id="r", token_ids=tuple(tokens), num_prompt_tokens=count, tenant=tenant, salt=salt)
    return Sequence(request, 0, model="m", block_size=8, max_context=4096)


class FakeProposer:
    """Implements Proposer: says whatever `guess` says of the tokens so far."""

    def __init__(self, guess: Callable[[Seq[int], int], Seq[int]]) -> None:
        self._guess = guess
        self.finished_with: list[list[int]] = []
        self.num_asked = 0

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        self.num_asked += len(sequences)
        guesses = [self._guess(sequence.tokens, max_tokens) for sequence in sequences]
        return [Proposal(tokens, [0] * len(tokens)) for tokens in guesses]

    def finished(self, sequence: Sequence) -> None:
        self.finished_with.append(list(sequence.tokens))


def propose(proposer: Proposer, sequence: Sequence, max_tokens: int) -> Proposal:
    """What it says of one sequence alone."""
    (proposal,) = proposer.propose([sequence], max_tokens)
    return proposal
