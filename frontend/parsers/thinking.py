"""Separation of thinking from the answer: <think>…</think>, opened by the template or the model."""

from __future__ import annotations

from frontend.parsers.scanner import overlap

THINK, END_THINK = "<think>", "</think>"


class ThinkingReader:
    """Parser of the beginning of one answer. Space around thinking belongs to its markers."""

    def __init__(self, *, is_open: bool) -> None:
        """is_open: the prompt ends with the opening marker."""
        self._is_open = is_open
        self._held = ""
        self._state = "opened" if is_open else "before"

    def fresh(self) -> ThinkingReader:
        """Return a fresh reader in the initial state."""
        return ThinkingReader(is_open=self._is_open)

    @property
    def is_inside(self) -> bool:
        return self._state in ("opened", "inside")

    def add(self, text: str) -> tuple[str, str]:
        """Consume text. Return (thinking, answer) that can be sent now."""
        self._held += text
        if self._state == "before":
            self._open()
        thinking = self._think() if self.is_inside else ""
        if self._state == "closed":
            self._held = self._held.lstrip()
            self._state = "after" if self._held else "closed"
        if self._state == "after":
            text, self._held = self._held, ""
            return thinking, text
        return thinking, ""

    def finish(self) -> tuple[str, str]:
        """Return the remaining (thinking, answer) at the end of the text."""
        held, self._held = self._held, ""
        return ("", held) if self._state == "before" else (held.rstrip() if self._state != "after" else "", "")

    def _open(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(THINK):
            self._held, self._state = begun.removeprefix(THINK), "opened"
        elif not THINK.startswith(begun):
            self._state = "after"

    def _think(self) -> str:
        if self._state == "opened":
            self._held = self._held.lstrip()
            if not self._held:
                return ""
            self._state = "inside"
        thought, end, rest = self._held.partition(END_THINK)
        if end:
            self._held, self._state = rest, "closed"
            return thought.rstrip()
        num = len(self._held[: len(self._held) - overlap(self._held, END_THINK)].rstrip())
        thought, self._held = self._held[:num], self._held[num:]
        return thought
