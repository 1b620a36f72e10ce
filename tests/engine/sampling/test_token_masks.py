"""Tokens that complete a bad word, against the naive definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.types.request import TokenRules
from engine.sampling.token_masks import TokenRuleTensors

_tokens = st.integers(0, 3)  # so few that they repeat often
_words = st.lists(st.lists(_tokens, min_size=1, max_size=4).map(tuple), max_size=6).map(tuple)


@given(words=_words, prompt=st.lists(_tokens, max_size=4), output=st.lists(_tokens, max_size=8))
def test_last_token_of_bad_word_is_forbidden(
    words: tuple[tuple[int, ...], ...], prompt: list[int], output: list[int]
) -> None:
    """Only generated tokens count: a bad word does not begin in the prompt."""
    found = TokenRuleTensors(TokenRules(bad_words=words)).forbidden(prompt + output, len(prompt))
    assert set(found) == {word[-1] for word in words if tuple(output[len(output) - len(word) + 1 :]) == word[:-1]}


def test_bad_word_longer_than_answer_forbids_nothing() -> None:
    ruled = TokenRuleTensors(TokenRules(bad_words=((7, 7, 8), (5,))))
    assert ruled.forbidden([7, 7, 7], 2) == [5]
    assert sorted(ruled.forbidden([7, 7, 7], 1)) == [5, 8]
