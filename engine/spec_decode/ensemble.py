"""What several methods have guessed of a row, place by place, and where they are of several minds."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate
from operator import mul

from engine.spec_decode.acceptance import Acceptance
from engine.spec_decode.guess import Guess, GuessedBranch
from engine.spec_decode.proposer import NUM_KINDS

ENSEMBLE = "ensemble"

_MOST_PLACES = 4  # at which it may branch
_MOST_BRANCHES = 2  # at each


def together(guesses: Seq[Guess], branching: Acceptance) -> Guess:
    """Of two or more: at each place the token that is likeliest to be right, by whoever has agreed with all before it.
    Who says another one begins a branch, in which it goes on as it would have; and all whose own branches begin there
    have them.

    branching: how often such a token is right, by how sure its method is of it. The kinds of tokens are left out: each
    method learns from its own guess.
    """
    first, *others = guesses
    if not any(one.branches for one in guesses) and all(map(first.says_what, others)):  # mostly
        likeliest = map(max, *(one.shares() for one in guesses))
        return Guess(first.start, first.tokens, (), list(accumulate(likeliest, mul)))
    tokens: list[int] = []
    chances: list[float] = []
    branches: list[GuessedBranch] = []
    above = 1.0
    agreeing = [(guess, guess.tokens, guess.shares()) for guess in guesses]
    while going_on := [one for one in agreeing if len(one[1]) > len(tokens)]:
        place = len(tokens)
        token, share = -1, -1.0
        for _, said, shares in going_on:
            if shares[place] > share:
                token, share = said[place], shares[place]
        agreeing = [one for one in going_on if one[1][place] == token]
        if place < _MOST_PLACES:
            found = [branch for guess, *_ in going_on if guess.branches for branch in _of_itself(guess, place, above)]
            if len(agreeing) < len(going_on):
                found += [
                    _instead(guess, place, above, shares[place], share, branching)
                    for guess, said, shares in going_on
                    if said[place] != token
                ]
            if found:
                branches += _likeliest([branch for branch in found if branch.tokens[0] != token])
        above *= share
        tokens.append(token)
        chances.append(above)
    return Guess(first.start, tokens, (), chances, branches)


def _instead(guess: Guess, place: int, above: float, share: float, best: float, branching: Acceptance) -> GuessedBranch:
    """What it says though another one says better. best: the share of that one's token: of all that may come next one
    comes."""
    kind = min(NUM_KINDS - 1, int(share * NUM_KINDS))
    first = above * min(branching.chance(kind), 1.0 - best)
    own = guess.chances[place]
    chances = [first * chance / own if own else 0.0 for chance in guess.chances[place:]]
    return GuessedBranch(place, guess.tokens[place:], kind, chances)


def _of_itself(guess: Guess, place: int, above: float) -> list[GuessedBranch]:
    """Its own branches, where all before is believed as much as it is together."""
    before = guess.chances[place - 1] if place else 1.0
    if not before:
        return []
    scale = above / before
    return [
        GuessedBranch(place, branch.tokens, -1, [scale * chance for chance in branch.chances])
        for branch in guess.branches
        if branch.place == place
    ]


def _likeliest(branches: list[GuessedBranch]) -> list[GuessedBranch]:
    """Of those that begin alike one."""
    best: dict[int, GuessedBranch] = {}
    for branch in sorted(branches, key=lambda one: one.chances[0], reverse=True):
        best.setdefault(branch.tokens[0], branch)
    return list(best.values())[:_MOST_BRANCHES]
