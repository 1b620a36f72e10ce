"""Prompt look-up: what followed the last tokens where they stood before, in the prompt or in the answer."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.scheduler.sequence import Sequence
from engine.spec_decode.histories import Histories
from engine.spec_decode.proposer import NOTHING, Proposal
from engine.spec_decode.token_index import MOST_MATCH


class Ngram:
    """Implements Proposer (Saxena 2023, prompt lookup decoding). Of several earlier places the one that agrees for
    longest counts, of these the latest. Its kinds: with how many tokens the place agrees up to the one in question, and
    whether it has come to its end before that, and begun again."""

    def __init__(self, histories: Histories) -> None:
        self._histories = histories

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        return [self._propose(sequence, max_tokens) for sequence in sequences]

    def finished(self, sequence: Sequence) -> None:
        pass

    def _propose(self, sequence: Sequence, max_tokens: int) -> Proposal:
        index = self._histories.of(sequence)
        matches = index.matches_of_end()
        if not matches or max_tokens < 1:
            return NOTHING
        best = max(matches, key=lambda match: match.num_tokens)  # max takes the first of equals
        tokens = index.tokens[best.next : best.next + max_tokens]
        period = len(tokens)
        while len(tokens) < max_tokens:  # a place that reaches to the end goes on as it began
            tokens.append(tokens[-period])
        again = [MOST_MATCH * (i >= period) for i in range(len(tokens))]
        return Proposal(tokens, [min(best.num_tokens + i, MOST_MATCH) - 1 + more for i, more in enumerate(again)])
