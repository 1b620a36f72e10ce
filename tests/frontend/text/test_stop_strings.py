"""Stop strings, against a definition over the whole text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from frontend.text.stop_strings import StopMatcher


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Return the end of the first complete stop string, and the longest one that ends there."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


def run(pieces: list[str], matcher: StopMatcher) -> tuple[list[str], str | None]:
    sent = []
    for piece in pieces:
        text, stop = matcher.add(piece)
        sent.append(text)
        if stop is not None:
            return sent, stop
    return [*sent, matcher.finish()], None


small_text = st.text(alphabet="ab", max_size=5)  # few letters, so that much of it matches


@given(
    pieces=st.lists(small_text, max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4),
    include_stop=st.booleans(),
)
@example(pieces=["xabc"], stops=["abcd", "bc"], include_stop=False)
@example(pieces=["aabaabaaa"], stops=["aabaaa"], include_stop=False)
def test_matches_the_definition(pieces: list[str], stops: list[str], include_stop: bool) -> None:
    text = "".join(pieces)
    sent, stop = run(pieces, StopMatcher(stops, include_stop=include_stop))
    found = first_stop(text, stops)
    if found is None:
        assert ("".join(sent), stop) == (text, None)
    else:
        end, expected = found
        assert stop == expected
        assert "".join(sent) == text[: end if include_stop else end - len(expected)]


@given(pieces=st.lists(small_text, max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1))
def test_holds_back_only_possible_stop_strings(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = sent = ""
    for piece in pieces:
        text, stop = matcher.add(piece)
        if stop is not None:
            return
        seen, sent = seen + piece, sent + text
        held = seen[len(sent) :]
        prefixes = {stop[:n] for stop in stops for n in range(len(stop))}
        assert held == max((p for p in prefixes if seen.endswith(p)), key=len)


class CountedText(str):
    """String that counts accesses to its characters."""

    num_looks = 0

    def __getitem__(self, index: Any) -> str:
        CountedText.num_looks += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(("text", "most"), [("", 0), ("b" * 100, 200), ("ab" * 50, 600), ("aaab" * 25, 600)])
def test_cost_is_linear_in_the_text(text: str, most: int) -> None:
    """Cost must not depend on the length of stop strings: every choice has its own matcher, created before any token
    is charged."""
    CountedText.num_looks = 0
    matcher = StopMatcher([CountedText("a" * 1023 + "b")])
    matcher.add(text)
    assert CountedText.num_looks <= most
