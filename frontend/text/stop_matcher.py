"""Stop strings: the text ends before the one that is complete first, whichever tokens it was made of."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a text that arrives in pieces at the first stop string, and holds back what may still become one.

    First means: complete at the earliest character. Of several that end there the longest counts, so that the result
    does not depend on how the text was cut into pieces, or on the order of the stop strings.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include_stop = include_stop
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """The text that can go out, and the stop string that ended it, if one did. Nothing may be added after that."""
        if not self._patterns:
            return text, None
        for i, character in enumerate(text):
            # Every pattern must see every character, so this is a list and not a generator.
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
        """The text held back, when no more will come."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """How much of one stop string the text ends with (Knuth, Morris and Pratt 1977): amortised one step a character.

    What is known of the stop string reaches as far as the text has matched it: one that never begins costs nothing,
    however long it is and however many choices have it.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._borders = [0]  # of each prefix so far, the length of its longest proper prefix that is its suffix

    def advance(self, character: str) -> bool:
        """True when the text now ends with the whole stop string."""
        self.num_matched = self._extend(self.num_matched, character)
        if self.num_matched > len(self._borders):
            self._borders.append(self._extend(self._borders[-1], character))
        return self.num_matched == len(self.text)

    def _extend(self, num_matched: int, character: str) -> int:
        while num_matched and self.text[num_matched] != character:
            num_matched = self._borders[num_matched - 1]
        return num_matched + (self.text[num_matched] == character)
