"""Incremental JSON validator, which finds the end of a value."""

from __future__ import annotations

import json
import re
import string

_MAX_DEPTH = 64
_MAX_SPACE = 64  # characters between a comma that is dropped and the bracket after it
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # inside a string
_SPACE = re.compile(r"[ \t\n\r]*")
_WORD = set("-+." + string.digits + string.ascii_letters)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]*)?)?")
_LITERALS = ("true", "false", "null")
_PYTHONS = {"True": "true", "False": "false", "None": "null"}
_HEX = set("0123456789abcdefABCDEF")


class JsonValue:
    """One value of RFC 8259: a pushdown automaton."""

    def __init__(self, *, is_repaired: bool = False) -> None:
        """is_repaired: accept frequent mistakes of models: control characters and unknown escapes in strings, a comma
        before a closing bracket, True, False and None. `repairs` collects their corrections."""
        self.is_done = False
        self.is_bad = False
        self.repairs: list[tuple[int, str]] = []  # index in the last text, replacement for its character
        self._is_repaired = is_repaired
        self._waits = False  # for more text
        self._open: list[str] = []
        self._next = "value"
        self._word = ""  # number, with runs of digits cut to two, or literal
        self._num_hex = 0  # remaining digits of \\u
        self._is_key = False

    def feed(self, text: str) -> int:
        """Consume text. Return how many characters belong to the value: fewer than given if it ended or is bad, or if
        the rest must be fed again together with the next text."""
        at = 0
        self.repairs.clear()
        self._waits = False
        while at < len(text) and not self.is_done and not self.is_bad and not self._waits:
            at = getattr(self, f"_in_{self._next}")(text, at)
        return at

    def end(self) -> None:
        """Note the end of the text."""
        if self._next == "word":
            self._end_word()
        self.is_bad |= not self.is_done

    def _in_value(self, text: str, at: int) -> int:
        at = _after_space(text, at)
        if at == len(text):
            return at
        match text[at]:
            case "{" | "[" as opening if len(self._open) < _MAX_DEPTH:
                self._open.append(opening)
                self._next = "first_key" if opening == "{" else "first_item"
            case '"':
                self._next, self._is_key = "string", False
            case "T" | "F" | "N" if self._is_repaired:
                return self._in_pythons_word(text, at)
            case character if character.isalnum() or character == "-":
                self._next, self._word = "word", ""
                return at
            case _:
                self.is_bad = True
                return at
        return at + 1

    def _in_pythons_word(self, text: str, at: int) -> int:
        for word, made in _PYTHONS.items():
            if text.startswith(word, at):
                self.repairs += [(at, made), *((at + offset, "") for offset in range(1, len(word)))]
                self._next, self._word = "word", made
                return at + len(word)
            self._waits |= word.startswith(text[at : at + len(word)])
        self.is_bad = not self._waits
        return at

    def _in_first_item(self, text: str, at: int) -> int:
        at = _after_space(text, at)
        if text[at : at + 1] == "]":
            return self._close(at)
        if at < len(text):
            self._next = "value"
        return at

    def _in_first_key(self, text: str, at: int) -> int:
        at = _after_space(text, at)
        if text[at : at + 1] == "}":
            return self._close(at)
        return self._in_key(text, at)

    def _in_key(self, text: str, at: int) -> int:
        return self._one(text, at, {'"': "string"}, is_key=True)

    def _in_colon(self, text: str, at: int) -> int:
        return self._one(text, at, {":": "value"})

    def _in_after(self, text: str, at: int) -> int:
        """Read the comma or bracket that follows a value inside an object or array."""
        at = _after_space(text, at)
        is_object = self._open[-1] == "{"
        if text[at : at + 1] == ("}" if is_object else "]"):
            return self._close(at)
        if self._is_repaired and text[at : at + 1] == ",":
            behind = _after_space(text, at + 1)
            if behind - at <= _MAX_SPACE:
                self._waits = behind == len(text)
                if self._waits:
                    return at
                if text[behind] == ("}" if is_object else "]"):
                    self.repairs.append((at, ""))
                    return at + 1
        return self._one(text, at, {",": "key" if is_object else "value"})

    def _in_string(self, text: str, at: int) -> int:
        plain = _PLAIN.match(text, at)
        assert plain
        at = plain.end()
        if at == len(text):
            return at
        match text[at]:
            case '"' if self._is_key:
                self._next = "colon"
            case '"':
                self._end_value()
            case "\\":
                self._next = "escape"
            case control if self._is_repaired:
                self.repairs.append((at, json.dumps(control)[1:-1]))
            case _:
                self.is_bad = True
                return at
        return at + 1

    def _in_escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._next, self._num_hex = "hex", 4
        elif text[at] in '"\\/bfnrt':
            self._next = "string"
        elif self._is_repaired:
            self._next = "string"
            self.repairs.append((at, _behind_backslash(text[at])))
        else:
            self.is_bad = True
            return at
        return at + 1

    def _in_hex(self, text: str, at: int) -> int:
        if text[at] not in _HEX:
            self.is_bad = True
            return at
        self._num_hex -= 1
        if not self._num_hex:
            self._next = "string"
        return at + 1

    def _in_word(self, text: str, at: int) -> int:
        """Read characters of a number or literal."""
        while at < len(text):
            if text[at] not in _WORD:
                self._end_word()
                return at
            word = self._word + text[at]
            if not _NUMBER_BEGUN.fullmatch(word) and not any(literal.startswith(word) for literal in _LITERALS):
                self.is_bad = True
                return at
            # Digits after the second one do not change what may follow.
            self._word = word[:-1] if word[-3:].isdigit() and len(word) > 2 else word
            at += 1
        return at

    def _one(self, text: str, at: int, next_of: dict[str, str], *, is_key: bool = False) -> int:
        at = _after_space(text, at)
        if at == len(text):
            return at
        if text[at] not in next_of:
            self.is_bad = True
            return at
        self._next, self._is_key = next_of[text[at]], is_key
        return at + 1

    def _end_word(self) -> None:
        self.is_bad = self._word not in _LITERALS and not _NUMBER.fullmatch(self._word)
        self._end_value()

    def _close(self, at: int) -> int:
        self._open.pop()
        self._end_value()
        return at + 1

    def _end_value(self) -> None:
        self.is_done = not self._open and not self.is_bad
        self._next = "after"


def _behind_backslash(character: str) -> str:
    """Return the text that makes a backslash before `character` valid JSON. A quote or control character stands for
    itself, as in Python and JavaScript; before others, the backslash is text."""
    if character == "'":
        return "u0027"
    return json.dumps(character)[2:-1] if character < " " else f"\\{character}"


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found
    return found.end()
