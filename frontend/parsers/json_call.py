"""Tool calls in JSON: {"name": …, "arguments": {…}}, or the arguments alone after a name."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from frontend.parsers.json_value import JsonValue
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
    if not (yield from _streamed(scan)):
        return False
    scan.end_call()
    return True


def _tail(scan: Scanner, *, is_open: bool = False) -> Reading[bool]:
    """Read the members after name and arguments, and the end; anything else is text. is_open: a comma was read."""
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


def _streamed(scan: Scanner) -> Reading[bool]:
    """Emit a value as it arrives. Gives up the call if the value is invalid."""
    yield from scan.optional("")  # skip leading space
    return (yield from _value(scan, scan.emit_arguments))


def _held(scan: Scanner) -> Reading[str]:
    """Read a value; "" if it is invalid or too long."""
    parts: list[str] = []
    return "".join(parts) if (yield from _value(scan, parts.append)) else ""


def _value(scan: Scanner, take: Callable[[str], None]) -> Reading[bool]:
    value = JsonValue(is_repaired=True)
    while True:
        text = scan.rest
        num = value.feed(text)
        if num:
            scan.take(num)
            take(_repaired(text[:num], value.repairs))
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


def _repaired(text: str, repairs: Sequence[tuple[int, str]]) -> str:
    parts, end = list[str](), 0
    for at, made in repairs:
        parts += text[end:at], made
        end = at + 1
    return "".join([*parts, text[end:]])


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
    if found is None or (text and found == ""):
        return "{}"
    return text.strip() if isinstance(found, dict) else ""
