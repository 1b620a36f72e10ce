"""Tool calls of Gemma 4: like JSON, but with bare keys, and with strings between <|"|> and without escapes."""

from __future__ import annotations

import json

from frontend.parsers.scanner import MAX_NAME, Reading, Scanner
from frontend.parsers.xml_call import BY_JSON, as_json, begun_as_json, streamed_string, take_begun

GEMMA4_MARKERS = _CALL, _CALL_END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'

_MAX_DEPTH = 64
_MAX_WORD = 1024  # characters of a key or a number
_NESTED = {"{": "}", "[": "]"}
_ENDS = (",", *"{}[]", _QUOTE, _CALL_END)  # of a key or a number


def gemma4(scan: Scanner) -> Reading[None]:
    """<|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>, once for each call."""
    while (yield from scan.next_call(f"{_CALL}call:")):
        name = (yield from scan.before("{", most=MAX_NAME)).strip()
        if name not in scan.tools:
            scan.give_up()
            continue
        scan.begin(name)
        if (yield from _value(scan, 0)):
            scan.end_call()
            yield from scan.optional(_CALL_END)
        else:
            scan.give_up()


def _value(scan: Scanner, depth: int) -> Reading[bool]:
    """Emit a value as JSON. Return whether it is whole."""
    if (yield from scan.optional(_QUOTE)):
        scan.emit_arguments('"')
        yield from streamed_string(scan, _QUOTE)
        return (yield from scan.optional(_QUOTE))
    for opening, closing in _NESTED.items():
        if (yield from scan.optional(opening)):
            return depth < _MAX_DEPTH and (yield from _members(scan, opening, closing, depth + 1))
    word = (yield from scan.before(*_ENDS, most=_MAX_WORD)).strip()
    if word:
        scan.emit_arguments(as_json(word, BY_JSON))
    elif scan.is_ended and not any(end in scan.rest for end in _ENDS):
        scan.emit_arguments(begun_as_json(take_begun(scan, *_ENDS), BY_JSON))
    return bool(word)


def _members(scan: Scanner, opening: str, closing: str, depth: int) -> Reading[bool]:
    scan.emit_arguments(opening)
    is_over = yield from scan.optional(closing)
    while not is_over:
        if opening == "{":
            is_quoted = yield from scan.optional(_QUOTE)
            key = yield from scan.before(*((_QUOTE,) if is_quoted else (":", *_ENDS)), most=_MAX_WORD)
            if is_quoted and not (yield from scan.optional(_QUOTE)):
                return False
            if not (yield from scan.optional(":")):
                return False
            scan.emit_arguments(f"{json.dumps(key if is_quoted else key.strip(), ensure_ascii=False)}: ")
        if not (yield from _value(scan, depth)):
            return False
        is_over = yield from scan.optional(closing)
        if not is_over:
            if not (yield from scan.optional(",")):
                return False
            scan.emit_arguments(", ")
    scan.emit_arguments(closing)
    return True
