"""A JSON schema said so that llguidance keeps to all of it: what it knows too loosely is said in words that it knows.

Found with the specification's own tests (json-schema-org/JSON-Schema-Test-Suite), and with drawn schemas.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from math import lcm
from typing import Any

from core.types.json_schema import changed

# Two spellings of one key would be two keys to the masks: so no character has a second one. Control characters beside
# these five have no first one then, and are not written.
ESCAPES = 'nrbtf\\"'
_UNWRITTEN = re.compile(r"(?<!\\)(?:\\\\)*\\u00(?:[01]|7f)")  # in what json.dumps makes
_MAX_STEP = 16_384  # of `multipleOf`, as _step has it: 0.1 s; a million takes 7
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
# Beside a whole number that is excluded; of much smaller ones llguidance does not know.
_MARGIN, _RELATIVE = 1e-9, 1e-14
_RENDEZVOUS = frozenset(("allOf", "anyOf", "oneOf", "$ref"))  # through which several schemas hold for one value
_LEAP = "(?:0[48]|[2468][048]|[13579][26])"  # two digits of a year
_DAYS = rf"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|(?:[0-9][0-9]{_LEAP}|{_LEAP}00)-02-29)"
_YEARS = "^[0-9]{0,3}[1-9]"  # from 1, as Python and others count
_SECONDS = "^[^:]*:[0-9]{2}:[0-5]"  # no leap second, of which only some are
_LABEL = "(?:[^.]{1,2}|[^.]{2}[^.-][^.]*|[^.]{2}-(?:[^.-][^.]*)?)"
_LABELS = rf"^(?:{_LABEL}\.)*{_LABEL}\.?$"  # none as xn--…, which stands for other letters by rules of its own
_FORMATS = {
    "date": (_DAYS, _YEARS),
    "time": (_SECONDS,),
    "date-time": (_DAYS, _YEARS, _SECONDS),
    "hostname": (_LABELS,),
}


def exact(schema: Any, *, is_lenient: bool) -> Any:
    """Raises ValueError where it cannot be said, unless it is lenient, and RecursionError."""
    found = _parts(schema)
    is_slow, near = _is_slow(found), _near(found)
    if is_slow and not is_lenient:
        text = f"such as all together are kept to up to {_MAX_STEP}, zeros at its end and the point aside"
        raise ValueError(f"multipleOf: {text}")

    def change(keywords: Mapping[str, Any]) -> dict[str, Any]:
        if not is_lenient:
            _check(keywords)
        made = {key: value for key, value in keywords.items() if not (is_slow and key == "multipleOf")}
        if isinstance(pattern := made.get("pattern"), str):
            made["pattern"] = _in_rust(pattern)
        if isinstance(named := made.get("patternProperties"), Mapping):
            made["patternProperties"] = {_in_rust(pattern): one for pattern, one in named.items()}
        for key, unavailable in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
            value = made.get(key)
            if type(value) in (int, float) and value in near and value * unavailable >= 0:
                made[key] = value + unavailable * max(_MARGIN, abs(value) * _RELATIVE)
        form = made.get("format")
        if isinstance(form, str) and form in _FORMATS and isinstance(others := made.get("allOf", []), list):
            made["allOf"] = [*others, *({"pattern": pattern} for pattern in _FORMATS[form])]
        return made

    return changed(schema, change)


def has_unwritten(value: Any) -> bool:
    """Whether a text in it has a character that ESCAPES leave out. value: JSON's."""
    return bool(_UNWRITTEN.search(json.dumps(value)))


def _parts(schema: Any) -> list[Mapping[str, Any]]:
    found = list[Mapping[str, Any]]()

    def look(keywords: Mapping[str, Any]) -> Mapping[str, Any]:
        found.append(keywords)
        return keywords

    changed(schema, look)
    return found


def _near(found: Iterable[Mapping[str, Any]]) -> set[int]:
    """Whole numbers less than 1 away from a bound that is farther from 0: where they are excluded, llguidance lets them
    through all the same, be the two bounds said in one part or in several."""
    bounds = (keywords[key] for keywords in found for key in _BOUNDS if key in keywords)
    between = [value for value in bounds if isinstance(value, float) and not (math.isinf(value) or value.is_integer())]
    return {around(value) for value in between if value == value for around in (math.floor, math.ceil)}


def _is_slow(found: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a number's remainder has more values than can be told apart in time: where several steps may hold for
    one number, they count as one that all of them divide."""
    steps = {step for keywords in found for step in _step(keywords.get("multipleOf"))}
    is_rendezvous = any(_RENDEZVOUS & keywords.keys() for keywords in found)
    return (lcm(*steps) if is_rendezvous else sum(steps)) > _MAX_STEP


def _step(value: Any) -> Iterator[int]:
    """Its digits, without factors that a decimal's last digits alone tell of."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        return  # whoever compiles it says what is wrong
    step = int("".join(map(str, Decimal(str(value)).as_tuple().digits)))
    for factor in (2, 5):
        while step % factor == 0:
            step //= factor
    yield step


def _check(keywords: Mapping[str, Any]) -> None:
    for key in ("const", "enum"):
        if has_unwritten(keywords.get(key)):
            raise ValueError(f"{key}: of control characters \\b, \\f, \\n, \\r and \\t can be written, and no other")
    least, required = keywords.get("minProperties"), keywords.get("required", [])
    is_open = keywords.get("additionalProperties", True) is not False or "patternProperties" in keywords
    if isinstance(least, int) and isinstance(required, list) and is_open and least > 1 + len(required):
        text = f"up to {1 + len(required)} can be kept to here, one more than are required: keys that are not named in"
        raise ValueError(f"minProperties: {text} properties may come twice; set additionalProperties to false")


def _in_rust(pattern: str) -> str:
    """With what is a set of characters in Rust alone as ECMA-262 means it. Raises ValueError."""
    made, is_set, at = list[str](), False, 0
    while at < len(pattern):
        one, two = pattern[at], pattern[at : at + 2]
        if one == "\\":
            one = two
        elif is_set and two == "--":
            raise ValueError("pattern: -- in a set of characters is ambiguous; write \\-")
        elif is_set and (one == "[" or two in ("&&", "~~")):
            made.append("\\")
        elif not is_set and one == "[":
            is_set = True
            one = re.compile(r"\[\^?\]?").match(pattern, at)[0]  # type: ignore[index]
        elif one == "]":
            is_set = False
        made.append(one)
        at += len(one)
    return "".join(made)
