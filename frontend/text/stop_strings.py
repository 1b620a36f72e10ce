"""Stop strings: they end an answer and are cut from it, also where they arrive in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts the text at the first stop string, and holds back a suffix that may still become one.

    First means complete at the earliest character. If several end there, the longest wins, so that the result depends
    neither on how the text was split nor on the order of the stop strings.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include_stop = include_stop
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """Return the text that can be sent, and the stop string if one matched. Add nothing after a match."""
        for i, character in enumerate(text):
            # A list, not a generator: every pattern must see every character.
            complete = [pattern for pattern in self._patterns if pattern.advance(character)]
            if complete:
                stop = complete[0].text
                whole = self._held + text[: i + 1]
                self._held = ""
                return (whole if self._include_stop else whole[: -len(stop)]), stop
        whole = self._held + text
        num_held = max(pattern.num_matched for pattern in self._patterns)
        cut = len(whole) - num_held
        self._held = whole[cut:]
        return whole[:cut], None

    def finish(self) -> str:
        """Return the text held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """Prefix of one stop string that the text ends with (Knuth, Morris and Pratt 1977): amortized O(1) per character.

    The failure table grows only as far as the text has matched, so a stop string that never begins to match costs
    nothing, whatever its length.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._borders = [0]  # for each prefix so far: length of its longest proper prefix that is also its suffix

    def advance(self, character: str) -> bool:
        """Advance by one character. Return whether the text now ends with the whole stop string."""
        self.num_matched = self._extend(self.num_matched, character)
        if self.num_matched > len(self._borders):
            self._borders.append(self._extend(self._borders[-1], character))
        return self.num_matched == len(self.text)

    def _extend(self, num_matched: int, character: str) -> int:
        while num_matched and self.text[num_matched] != character:
            num_matched = self._borders[num_matched - 1]
        return num_matched + (self.text[num_matched] == character)
