"""Tool calls in JSON: {"name": …, "arguments": {…}}, or the arguments alone after a name."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable

from frontend.parsers.scanner import Reading, Scanner

_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("type", "id")  # members that some models add


def json_call(scan: Scanner, *, is_open: bool = False) -> Reading[bool]:
    """Read a call, with its members in any order. Return whether there was one. is_open: its brace has been read."""
    name, arguments = "", ""
    is_call = is_open or (yield from scan.optional("{"))
    while is_call:
        key = yield from _member(scan)
        if key == "name" and not name:
            name = _string((yield from _held(scan)))
            is_call = name in scan.tools
        elif key in _ARGUMENTS and name and (yield from scan.next_is("{")):
            return (yield from json_arguments(scan, name)) and (yield from _tail(scan))
        elif key in _ARGUMENTS:
            arguments = _object((yield from _held(scan)))
            is_call = bool(arguments)
        else:
            is_call = key in _OTHERS and bool((yield from _held(scan)))
        is_over = is_call and not (yield from scan.optional(","))
        if is_call and name and (arguments or (is_over and (yield from scan.next_is("}")))):
            scan.begin(name)
            scan.emit_arguments(arguments or "{}")
            scan.end_call()
            return (yield from _tail(scan, is_open=not is_over))
        is_call = is_call and not is_over
    scan.give_up()
    return False


def json_arguments(scan: Scanner, name: str) -> Reading[bool]:
    """Read the arguments of a call whose name has been read. Return whether there were any."""
    if name not in scan.tools or not (yield from scan.next_is("{")):
        scan.give_up()
        return False
    scan.begin(name)
    yield from scan.optional("")  # skip leading space
    if not (yield from _value(scan, scan.emit_arguments)):
        return False
    scan.end_call()
    return True


def _tail(scan: Scanner, *, is_open: bool = False) -> Reading[bool]:
    """Read members after name and arguments, and the end. Anything else is text. is_open: a comma was read."""
    while is_open or (yield from scan.optional(",")):
        is_open = False
        if (yield from _member(scan)) not in _OTHERS or not (yield from _held(scan)):
            scan.give_up()
            return True
    yield from scan.optional("}")
    return True


def _member(scan: Scanner) -> Reading[str]:
    """Read the key of the next member, up to its value; "" if there is none."""
    if not (yield from scan.next_is('"')):
        return ""
    key = _string((yield from _held(scan)))
    return key if (yield from scan.optional(":")) else ""


def _held(scan: Scanner) -> Reading[str]:
    """Read a value; "" if it is invalid or too long."""
    parts: list[str] = []
    return "".join(parts) if (yield from _value(scan, parts.append)) else ""


def _value(scan: Scanner, take: Callable[[str], None]) -> Reading[bool]:
    """Pass a value to `take` as it arrives. Return whether it is valid; an open call of an invalid one is given up."""
    value = JsonValue()
    while True:
        text = scan.rest
        num = value.feed(text)
        if num:
            scan.take(num)
            take(text[:num])
        if value.is_done:
            return True
        if not value.is_bad and scan.is_ended:
            value.end()
            if value.is_done:
                return True
        if value.is_bad or scan.is_held_for_too_long:
            if scan.is_begun:
                scan.give_up()
            return False
        yield


def _string(text: str) -> str:
    """Decode a JSON string; "" if it is not one."""
    return json.loads(text) if text.strip().startswith('"') else ""


def _object(text: str) -> str:
    """Return JSON arguments, also from inside a JSON string; "" if they are not an object."""
    try:
        found = json.loads(text or '""')
        if isinstance(found, str) and found:
            text, found = found, json.loads(found)
            text.encode()  # reject lone surrogates
    except (ValueError, RecursionError):  # includes numbers with more digits than Python accepts
        return ""
    if found is None:
        return "{}"
    return text.strip() if isinstance(found, dict) else ""


_MAX_DEPTH = 64
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # inside a string
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGUN = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{0,4})')
_SPACE = re.compile(r"[ \t\n\r]*")
_WORD = set("-+." + string.digits + string.ascii_letters)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]*)?)?")
_LITERALS = ("true", "false", "null")
# Next state by state and character. "{" and "[" are the states behind a value inside an object or an array.
_VALUE = {'"': "string", "{": "first key", "[": "first item"}
_NEXT = {
    "value": _VALUE,
    "first item": {**_VALUE, "]": "end"},
    "first key": {'"': "key", "}": "end"},
    "key behind a comma": {'"': "key"},
    "colon": {":": "value"},
    "{": {",": "key behind a comma", "}": "end"},
    "[": {",": "value", "]": "end"},
}


class JsonValue:
    """Incremental validator of one value of RFC 8259, which finds its end: a pushdown automaton."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_bad = False
        self._open: list[str] = []
        self._state = "value"
        self._word = ""  # number, with runs of digits cut to two, or literal
        self._escape = ""  # an escape that has begun, in a string or key

    def feed(self, text: str) -> int:
        """Consume text. Return how many characters belong to the value: fewer than given if it ended or is bad."""
        at = 0
        while at < len(text) and not self.is_done and not self.is_bad:
            if self._state in ("string", "key"):
                at = self._in_string(text, at)
            elif self._state == "word":
                at = self._in_word(text, at)
            else:
                at = self._between(text, at)
        return at

    def end(self) -> None:
        """Note the end of the text."""
        if self._state == "word":
            self._end_word()
        self.is_bad |= not self.is_done

    def _between(self, text: str, at: int) -> int:
        """Read space and the character behind it."""
        space = _SPACE.match(text, at)
        assert space
        at = space.end()
        if at == len(text):
            return at
        character = text[at]
        state = _NEXT[self._state].get(character, "")
        if not state and self._state in ("value", "first item") and (character.isalnum() or character == "-"):
            self._state, self._word = "word", ""
            return at
        if not state or (character in "{[" and len(self._open) == _MAX_DEPTH):
            self.is_bad = True
            return at
        if state == "end":
            self._open.pop()
            self._end_value()
        else:
            self._open += character if character in "{[" else ""
            self._state = state
        return at + 1

    def _in_string(self, text: str, at: int) -> int:
        if self._escape:
            self._escape += text[at]
            self.is_bad = not _ESCAPE_BEGUN.fullmatch(self._escape)
            if _ESCAPE.fullmatch(self._escape):
                self._escape = ""
            return at if self.is_bad else at + 1
        plain = _PLAIN.match(text, at)
        assert plain
        at = plain.end()
        if at == len(text):
            return at
        match text[at]:
            case '"' if self._state == "key":
                self._state = "colon"
            case '"':
                self._end_value()
            case "\\":
                self._escape = "\\"
            case _:
                self.is_bad = True
                return at
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

    def _end_word(self) -> None:
        self.is_bad = self._word not in _LITERALS and not _NUMBER.fullmatch(self._word)
        self._end_value()

    def _end_value(self) -> None:
        self.is_done = not self._open and not self.is_bad
        self._state = self._open[-1] if self._open else ""
