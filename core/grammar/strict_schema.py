"""Rewriting of JSON schemas so that llguidance enforces them completely: loose keywords become equivalent strict ones.

The specification's own tests (json-schema-org/JSON-Schema-Test-Suite) and random schemas showed the need for each.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from math import lcm
from typing import Any
from urllib.parse import quote

from core.types.json_schema import LITERAL, changed, target

# Each character has exactly one spelling, because the masks would take two spellings of a key for two keys. Control
# characters other than these five have no spelling and cannot be written.
ESCAPES = 'nrbtf\\"'
_UNWRITTEN = re.compile(r"(?<!\\)(?:\\\\)*\\u00(?:[01]|7f)")  # in the output of json.dumps
_MAX_STEP = 16_384  # limit of `multipleOf` as in _step: compiles in 0.1 s; a million takes 7 s
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
# Distance from an excluded whole number; llguidance ignores much smaller ones.
_MARGIN, _RELATIVE = 1e-9, 1e-14
_RENDEZVOUS = frozenset(("allOf", "anyOf", "oneOf", "$ref"))  # keywords that apply several schemas to one value
_LEAP = "(?:0[48]|[2468][048]|[13579][26])"  # last two digits of a leap year
_DAYS = rf"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|(?:[0-9][0-9]{_LEAP}|{_LEAP}00)-02-29)"
_YEARS = "^[0-9]{0,3}[1-9]"  # from year 1, as in Python
_SECONDS = "^[^:]*:[0-9]{2}:[0-5]"  # excludes leap seconds, most of which are invalid
_LABEL = "(?:[^.]{1,2}|[^.]{2}[^.-][^.]*|[^.]{2}-(?:[^.-][^.]*)?)"
_LABELS = rf"^(?:{_LABEL}\.)*{_LABEL}\.?$"  # excludes xn--… labels, which have rules of their own
_FORMATS = {
    "date": (_DAYS, _YEARS),
    "time": (_SECONDS,),
    "date-time": (_DAYS, _YEARS, _SECONDS),
    "hostname": (_LABELS,),
}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Not allowed in the fragment of a URI. Generators write the names of types as they are, such as #/$defs/Page[int].
_NO_FRAGMENT = re.compile(r"%(?![0-9A-Fa-f]{2})|[^A-Za-z0-9\-._~!$&'()*+,;=:@/?%]")
_NESTED = ("null", "array", "object")  # arrays and objects may be infinite; null stands for all other kinds


def exact(schema: Any, *, is_lenient: bool, keeps_patterns: bool = True) -> Any:
    """Rewrite a schema. A keyword with the value null counts as omitted.

    keeps_patterns: False drops regular expressions. Raises RecursionError, and unless `is_lenient`, ValueError if the
    schema cannot be enforced.
    """
    found = _parts(schema)
    is_slow, near = _is_slow(found), _near(found)
    if is_slow and not is_lenient:
        text = f"values must have a common multiple of at most {_MAX_STEP}, ignoring trailing zeros and the point"
        raise ValueError(f"multipleOf: {text}")

    def change(keywords: Mapping[str, Any]) -> dict[str, Any]:
        if not is_lenient:
            _check(keywords)
        dropped = {"multipleOf"} if is_slow else set[str]()
        if not keeps_patterns:
            dropped |= {"pattern", "patternProperties", "unevaluatedProperties"}
            if "patternProperties" in keywords:  # those that match would become additional
                dropped.add("additionalProperties")
        made = {
            key: _well_formed(key, value)
            for key, value in keywords.items()
            if key not in dropped and (value is not None or key in LITERAL)
        }
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


def _well_formed(key: str, value: Any) -> Any:
    """Return a keyword's value in the form that llguidance reads: references percent-encoded, counts as integers."""
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return "#" + _NO_FRAGMENT.sub(lambda found: quote(found[0], safe="", errors="replace"), value[1:])
    if key in _COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def has_unwritten(value: Any) -> bool:
    """Return whether a string in the JSON value has a character that cannot be written with ESCAPES."""
    return bool(_UNWRITTEN.search(json.dumps(value)))


def _parts(schema: Any) -> list[Mapping[str, Any]]:
    found = list[Mapping[str, Any]]()

    def look(keywords: Mapping[str, Any]) -> Mapping[str, Any]:
        found.append(keywords)
        return keywords

    changed(schema, look)
    return found


def _near(found: Iterable[Mapping[str, Any]]) -> set[int]:
    """Return the whole number next to each fractional bound, on the side of 0. llguidance allows these numbers even if
    another bound, in the same or in another part, excludes them."""
    bounds = (keywords[key] for keywords in found for key in _BOUNDS if key in keywords)
    between = [value for value in bounds if isinstance(value, float) and not (math.isinf(value) or value.is_integer())]
    return {around(value) for value in between if value == value for around in (math.floor, math.ceil)}


def _is_slow(found: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether `multipleOf` needs too many remainders. Where several may apply to one number, their least common
    multiple counts."""
    steps = {step for keywords in found for step in _step(keywords.get("multipleOf"))}
    is_rendezvous = any(_RENDEZVOUS & keywords.keys() for keywords in found)
    return (lcm(*steps) if is_rendezvous else sum(steps)) > _MAX_STEP


def _step(value: Any) -> Iterator[int]:
    """Yield the digits as an integer without its factors of 2 and 5, which need only the last digits of a number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        return  # the compiler reports the error
    step = int("".join(map(str, Decimal(str(value)).as_tuple().digits)))
    for factor in (2, 5):
        while step % factor == 0:
            step //= factor
    yield step


def _check(keywords: Mapping[str, Any]) -> None:
    for key in ("const", "enum"):
        if has_unwritten(keywords.get(key)):
            raise ValueError(f"{key}: the only supported control characters are \\b, \\f, \\n, \\r and \\t")
    least, required = keywords.get("minProperties"), keywords.get("required", [])
    is_open = keywords.get("additionalProperties", True) is not False or "patternProperties" in keywords
    if isinstance(least, int) and isinstance(required, list) and is_open and least > 1 + len(required):
        text = f"at most {1 + len(required)} is supported, one more than are required: keys that are not named in"
        raise ValueError(f"minProperties: {text} properties may come twice; set additionalProperties to false")


def _in_rust(pattern: str) -> str:
    """Escape set operators that only Rust's regex has, so that sets mean the same as in ECMA-262. Raises ValueError."""
    made, is_set, at = list[str](), False, 0
    while at < len(pattern):
        one, two = pattern[at], pattern[at : at + 2]
        if two == r"\Z" and not is_set:
            one, at = r"\z", at + 1  # Python's name of the end
        elif one == "\\":
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


def is_endless(schema: Any) -> bool:
    """Return whether a part requires itself, so that every instance is infinite and runs to the length limit.

    Unknown keywords count as finite. Takes time linear in the schema.
    """
    return not _Needs(schema).are_met()


class _Needs:
    """Graph of the parts that each part of a document needs in order to end. Each part is visited once.

    A node is the number of a part, or of a combination of parts.
    """

    def __init__(self, document: Any) -> None:
        self._document = document
        self._numbers: dict[int, int] = {}  # id() of a part that may not end -> node
        self._unread: list[tuple[int, Mapping[str, Any]]] = []
        self._num_lacking: list[int] = []  # unmet needs per node; 0: the node has a finite instance
        self._needed_by: list[list[int]] = []

    def are_met(self) -> bool:
        """Return whether the whole document has a finite instance."""
        whole = self._part(self._document)
        while self._unread:
            number, part = self._unread.pop()
            self._needs_all(number, list(self._checks(part)))
        ending = [number for number, lacking in enumerate(self._num_lacking) if not lacking]
        while ending:
            for number in self._needed_by[ending.pop()]:
                self._num_lacking[number] -= 1
                if not self._num_lacking[number]:
                    ending.append(number)
        return not self._num_lacking[whole]

    def _part(self, schema: Any) -> int:
        if not isinstance(schema, Mapping) or "const" in schema or "enum" in schema:
            return self._new()
        if id(schema) not in self._numbers:
            self._numbers[id(schema)] = number = self._new()
            self._unread.append((number, schema))
        return self._numbers[id(schema)]

    def _checks(self, schema: Mapping[str, Any]) -> Iterator[int]:
        """Yield the nodes that one value must satisfy."""
        yield from map(self._part, _list(schema.get("allOf")))
        if isinstance(reference := schema.get("$ref"), str):
            try:
                yield self._part(target(self._document, reference))
            except LookupError:
                pass
        for key in ("anyOf", "oneOf"):
            yield self._any([self._part(one) for one in _list(schema.get(key))])
        kinds = schema.get("type", _NESTED)
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if isinstance(kinds, list | tuple):
            yield self._any([self._kind(kind, schema) for kind in kinds])

    def _kind(self, kind: Any, schema: Mapping[str, Any]) -> int:
        parts: list[Any] = []
        if kind == "object" and isinstance(properties := schema.get("properties"), Mapping):
            parts = [properties.get(name) for name in _list(schema.get("required")) if isinstance(name, str)]
        if kind == "array" and isinstance(least := schema.get("minItems"), int):
            first = _list(schema.get("prefixItems"))
            parts = [*first[:least], *([schema.get("items")] if least > len(first) else [])]
        number = self._new()
        self._needs_all(number, [self._part(part) for part in parts])
        return number

    def _any(self, some: Sequence[int]) -> int:
        """Return a node that needs one of `some`, or nothing if `some` is empty."""
        number = self._new()
        self._num_lacking[number] = min(1, len(some))
        for one in some:
            self._needed_by[one].append(number)
        return number

    def _needs_all(self, number: int, others: Sequence[int]) -> None:
        self._num_lacking[number] = len(others)
        for other in others:
            self._needed_by[other].append(number)

    def _new(self) -> int:
        self._num_lacking.append(0)
        self._needed_by.append([])
        return len(self._num_lacking) - 1


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
