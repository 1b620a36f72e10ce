"""Parts of Lark grammars: JSON schemas, special tokens, structural tags.

All functions on schemas raise RecursionError if a schema is nested some 300 levels deep.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

from core.types.errors import RequestError
from core.types.json_schema import DROPPED, LITERAL, NAMED, WRITTEN, rewritten, target
from core.types.request import MAX_SCHEMA_BYTES, in_quotes

_TYPES = frozenset(("null", "boolean", "number", "integer", "string", "array", "object"))
# Look-around, word boundaries and back-references, which no automaton can follow; also matches escaped ones.
_LOOKING_AROUND = re.compile(r"\(\?<?[=!]|\\[bB1-9]|\\k<")
_PART = re.compile(r"\(\?<?[=!]|\\k<|\[\^?\]?(?:[^\]\\]|\\.)*\]|\\.|.", re.DOTALL)  # of a regular expression
_REPEATED = re.compile(r"(?:[*+?]|\{\d+,?\d*\})[?+]?")
# Other formats are annotations, as in the specification. pydantic writes `path`, `password` and `binary`.
_FORMATS = frozenset(
    ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)
MAY_BE_WEAKENED = re.compile(rf'{_LOOKING_AROUND.pattern}|"format"')  # in the text of a schema
_OF_DOCUMENT = frozenset(("$id", "$schema"))  # keywords of a schema document
_ANYTHING = "/(?s:.*)/"
_MAX_LISTED = 512  # tags, triggers and elements of one format
_MAX_ENDS = 16  # of one tag
_FLAGS = {"at_least_one": False, "stop_after_first": False}
_FIELDS: Mapping[str, tuple[Mapping[str, type | tuple[type, ...]], Mapping[str, Any]]] = {
    # by type: required fields, and optional fields with their defaults
    "const_string": ({"value": str}, {}),
    "json_schema": ({"json_schema": (dict, bool)}, {}),
    "any_text": ({}, {}),
    "sequence": ({"elements": list}, {}),
    "or": ({"elements": list}, {}),
    "tag": ({"begin": str, "content": dict, "end": (str, list)}, {}),
    "triggered_tags": ({"triggers": list, "tags": list}, _FLAGS),
    "tags_with_separator": ({"tags": list, "separator": str}, _FLAGS),
}
_NEUTRAL = {"style": ("json", None), "any_order": (False, None), "excludes": ([], None), "max_tokens": (None,)}

_Format = Mapping[str, Any]


def in_lark(schema: Mapping[str, Any], *, is_lenient: bool) -> str:
    """Return the schema as an expression of llguidance's Lark, in json.dumps's whitespace."""
    return f"%json {json.dumps({**schema, 'x-guidance': {**WRITTEN, 'lenient': is_lenient}})}"


def lenient(schema: Any) -> Any:
    """Return the schema without the parts that no grammar can enforce; for schemas that need not be strict."""

    def rule(key: str, value: Any) -> Any:
        if key == "pattern" and isinstance(value, str):
            return DROPPED if (weaker := without_look_around(value)) is None else weaker
        return value if _can_be_enforced(key, value, schema) else DROPPED

    return rewritten(schema, rule)


def weakened(schema: Any, param: str) -> tuple[Any, list[str]]:
    """Return a schema that accepts more, and the paths of what changed.

    Patterns lose their look-around, which pydantic writes for a Decimal, and formats that no grammar enforces are left
    out. Raises RequestError for back-references, with path and keyword.
    """
    paths = list[str]()

    def weaker(value: Any, path: str, *, is_named: bool = False) -> Any:
        if isinstance(value, list):
            return [weaker(one, f"{path}[{number}]") for number, one in enumerate(value)]
        if not isinstance(value, Mapping):
            return value
        found = dict(value)
        for key, one in value.items():
            if key == "pattern" and isinstance(one, str) and not is_named:
                found[key] = pattern(one, f"{path}.{key}")
            elif key == "format" and isinstance(one, str) and one not in _FORMATS and not is_named:
                del found[key]
                paths.append(f"{path}.{key}")
            elif key not in LITERAL or is_named:
                found[key] = weaker(one, f"{path}.{key}", is_named=key in NAMED and not is_named)
        return found

    def pattern(value: str, path: str) -> str:
        if (found := without_look_around(value)) is None:
            text = f"{path}: back-references are not supported; write the pattern without them"
            raise RequestError(text, param=param)
        if found != value:
            paths.append(path)
        return found

    return weaker(schema, param), paths


def without_look_around(pattern: str) -> str | None:
    """Return the pattern without look-around and word boundaries, so that it accepts more; None if it has
    back-references."""
    kept, at, depth = list[str](), 0, 0  # depth: of groups inside a look-around
    while found := _PART.match(pattern, at):
        part, at = found[0], found.end()
        if part == r"\k<" or (part[0] == "\\" and part[1:].isdecimal() and part != r"\0"):
            return None
        is_around = part in ("(?=", "(?!", "(?<=", "(?<!")
        if depth or is_around:
            depth += {"(": 1, ")": -1}.get(part[0], 0)
        elif part not in (r"\b", r"\B"):
            kept.append(part)
            continue
        if not depth and (repeated := _REPEATED.match(pattern, at)):
            at = repeated.end()
    return "".join(kept)


def _can_be_enforced(key: str, value: Any, document: Any) -> bool:
    match key, value:
        case "$ref", str():
            try:
                target(document, value)
            except LookupError:
                return False
        case "type", str():
            return value in _TYPES
        case "type", list():
            return all(isinstance(one, str) and one in _TYPES for one in value)
    return True


def moved(schema: Any, place: str) -> Any:
    """Return the schema for another place of a document, with its internal references adjusted."""

    def relocate(key: str, value: Any) -> Any:
        is_inside = key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))
        return place + value[1:] if is_inside else value

    return rewritten({key: value for key, value in schema.items() if key not in _OF_DOCUMENT}, relocate)


class SpecialTokens:
    """Special tokens of one model, which text in a grammar never matches. Generated expressions accept either the token
    or its spelled-out text, as the parsers do."""

    def __init__(self, ids: Mapping[str, int] | None = None) -> None:
        """ids: token ids by text."""
        self._ids = ids or {}

    def literal(self, text: str) -> str:
        """Return a Lark expression for exactly this text; empty for an empty text."""
        pieces = self._pattern.split(text) if self._ids else [text]
        spelt = ((piece, in_quotes(piece)) for piece in pieces if piece)
        return " ".join(f"({text} | <[{self._ids[piece]}]>)" if piece in self._ids else text for piece, text in spelt)

    def one_of(self, texts: Iterable[str]) -> str:
        expressions = [self.literal(text) for text in texts]
        return f"({' | '.join(expressions)})" if any(expressions) else ""

    def begun(self, text: str) -> tuple[str, str] | None:
        """Return the special token that the text begins with, by its name in Lark, and the rest; or None."""
        found = self._pattern.match(text) if self._ids else None
        return (f"<[{self._ids[found[0]]}]>", text[found.end() :]) if found else None

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._ids, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


def structural_tag_rules(text: str, param: str, special: SpecialTokens) -> list[str]:
    """Convert structural tags, as in xgrammar, to Lark rules, with the rule `answer` last: free text up to a trigger,
    then a tag constrained by a schema.

    Both forms are supported: {"structures", "triggers"} and {"format"} with the formats of _FIELDS; others are rejected
    with their path. Free text ends where the enclosing tag ends, or with the answer. Lexemes that end with a literal
    are lazy, so the first trigger and the first end count. text: JSON. Raises RequestError and RecursionError.
    """
    writer = _Writer(param, special)
    if len(text) > MAX_SCHEMA_BYTES:
        raise RequestError(f"{param}: at most {MAX_SCHEMA_BYTES} bytes are accepted", param=param)
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict) or given.get("type", "structural_tag") != "structural_tag":
        writer.fail("", 'must be an object such as {"type": "structural_tag", "format": {…}}')
    parts = {name for name, part in given.items() if part is not None and name != "type"}
    if parts not in ({"format"}, {"structures", "triggers"}):
        writer.fail("", "must have either format, or structures and triggers, and nothing else")
    if "format" in parts:
        answer = writer.written(writer.checked(given["format"], "format"), "format", ())
    else:
        answer = writer.written(_as_format(given, writer), "structures", ())
    return [*writer.rules, f"answer: {answer}"]


def _as_format(given: Mapping[str, Any], writer: _Writer) -> _Format:
    """Convert the older form to the newer one."""
    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        writer.fail("", "must have lists of structures and triggers")
    tags = list[dict[str, Any]]()
    for number, one in enumerate(structures):
        if not isinstance(one, dict) or set(one) - {"begin", "schema", "end"}:
            writer.fail(f"structures[{number}]", "must be an object of begin, schema and end")
        content = {"type": "json_schema", "json_schema": one.get("schema")}
        tags.append({"type": "tag", "begin": one.get("begin"), "content": content, "end": one.get("end")})
    return writer.checked({"type": "triggered_tags", "triggers": triggers, "tags": tags}, "structures")


class _Writer:
    """Writer of one grammar. Paths are those in the client's JSON."""

    def __init__(self, param: str, special: SpecialTokens) -> None:
        self.rules: list[str] = []
        self._param = param
        self._special = special
        self._literal = special.literal
        self._ends: dict[tuple[str, ...], str] = {}  # rules by ends, which many parts of a format may share
        self._texts: dict[tuple[str, ...], str] = {}  # rules of free text, by its ends

    def fail(self, path: str, why: str) -> NoReturn:
        raise RequestError(f"{self._param}: {path + ' ' if path else ''}{why}", param=self._param)

    def checked(self, form: Any, path: str, *, kind: str | None = None) -> _Format:
        """Validate the fields of one format. kind: the required type, which may then be omitted."""
        if not isinstance(form, dict):
            self.fail(path, "must be an object")
        name = form.get("type", kind)
        if not isinstance(name, str) or name not in _FIELDS or (kind and name != kind):
            known = kind or ", ".join(_FIELDS)
            self.fail(f"{path}.type", f"{str(name)[:32]!r} is not supported; supported: {known}")
        needed, flags = _FIELDS[name]
        for field, value in form.items():
            is_flag = field in flags and isinstance(value, bool | None)
            if not (field == "type" or field in needed or is_flag or value in _NEUTRAL.get(field, ())):
                self.fail(f"{path}.{field[:64]}", "is not supported")
        for field, types in needed.items():
            if not isinstance(form.get(field), types):
                self.fail(f"{path}.{field}", "is required" if form.get(field) is None else "has a wrong type")
            if isinstance(form[field], list) and not 0 < len(form[field]) <= _MAX_LISTED:
                self.fail(f"{path}.{field}", f"must have 1 to {_MAX_LISTED} elements")
        return {**flags, **form, "type": name}

    def written(self, form: _Format, path: str, ends: tuple[str, ...]) -> str:
        """Return the expression of a format followed by one of `ends`; empty `ends`: the format stands alone."""
        match form["type"]:
            case "const_string":
                return f"{self._literal(form['value'])} {self._end(ends)}"
            case "json_schema":
                schema = form["json_schema"]
                if isinstance(schema, bool):
                    schema = {} if schema else {"not": {}}
                return f"{self._rule(in_lark(lenient(schema), is_lenient=True))} {self._end(ends)}"
            case "any_text":
                return self._text(ends)
            case "sequence":
                *parts, last = self._listed(form, "elements", path)
                for part, place in parts:
                    if _is_free(part):
                        self.fail(place, "is free text, which is allowed only as the last element of a sequence")
                before = " ".join(self.written(part, place, ()) for part, place in parts)
                return f"{before} {self.written(*last, ends)}"
            case "or":
                return f"({' | '.join(self.written(*one, ends) for one in self._listed(form, 'elements', path))})"
            case "tag":
                return f"{self._literal(form['begin'])} {self._behind_begin(form, path)} {self._end(ends)}"
            case "tags_with_separator":
                return f"{self._separated(form, path)} {self._end(ends)}"
        return self._triggered(form, path, ends)

    def _behind_begin(self, tag: _Format, path: str) -> str:
        content = self.checked(tag["content"], f"{path}.content")
        given = [tag["end"]] if isinstance(tag["end"], str) else tag["end"]
        if len(given) > _MAX_ENDS or not all(isinstance(end, str) for end in given):
            self.fail(f"{path}.end", f"must be a string, or a list of at most {_MAX_ENDS} strings")
        if _is_free(content) and "" in given:
            self.fail(f"{path}.end", "must not be empty after free text")
        return self.written(content, f"{path}.content", tuple(given))

    def _separated(self, form: _Format, path: str) -> str:
        tags = self._listed(form, "tags", path, kind="tag")
        one = self._rule(" | ".join(self.written(tag, place, ()) for tag, place in tags))
        more = "" if form["stop_after_first"] else f"({self._literal(form['separator'])} {one})*"
        return f"({one} {more}){'' if form['at_least_one'] else '?'}"

    def _triggered(self, form: _Format, path: str, ends: tuple[str, ...]) -> str:
        triggers = form["triggers"]
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            self.fail(f"{path}.triggers", "must be non-empty strings")
        behind: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        named: dict[str, list[str]] = {}  # by the special token with which a tag begins
        first = list[str]()
        for tag, place in self._listed(form, "tags", path, kind="tag"):
            begin = tag["begin"]
            found = [trigger for trigger in behind if begin.startswith(trigger)]
            if len(found) != 1:
                self.fail(f"{place}.begin", f"must begin with exactly one trigger, not with {len(found) or 'none'}")
            body = self._rule(self._behind_begin(tag, place))
            behind[found[0]].append(f"{self._literal(begin.removeprefix(found[0]))} {body}")
            first.append(f"{self._literal(begin)} {body}")
            if token := self._special.begun(begin):
                named.setdefault(token[0], []).append(f"{self._literal(token[1])} {body}")
        if idle := next((trigger for trigger, tags in behind.items() if not tags), None):
            self.fail(f"{path}.triggers", f"has {idle[:64]!r}, with which no tag begins")
        if form["at_least_one"] and form["stop_after_first"]:
            return f"({' | '.join(first)}) {self._end(ends)}"
        before = [self._rule(f"{_ANYTHING} {in_quotes(trigger)}", mark="[lazy]") for trigger in behind]
        spelt = [f"{text} ({' | '.join(tags)})" for text, tags in zip(before, behind.values(), strict=True)]
        tags = " | ".join(
            [*spelt, *(f"{self._anything} {token} ({' | '.join(tags)})" for token, tags in named.items())]
        )
        if form["stop_after_first"]:
            return f"(({tags}) {self._end(ends)} | {self._text(ends)})"
        return f"{'(' + ' | '.join(first) + ')' if form['at_least_one'] else ''} ({tags})* {self._text(ends)}"

    def _text(self, ends: tuple[str, ...]) -> str:
        """Return free text up to and including the first of `ends`."""
        if not ends:
            return self._anything
        if ends not in self._texts:
            spelt = self._rule(f"{_ANYTHING} {SpecialTokens().one_of(ends)}", mark="[lazy]")
            tokens = [token for end in ends if (token := self._special.begun(end))]
            named = [f"{self._anything} {token} {self._literal(rest)}" for token, rest in tokens]
            self._texts[ends] = self._rule(" | ".join([spelt, *named]))
        return self._texts[ends]

    def _end(self, ends: tuple[str, ...]) -> str:
        if any(ends) and ends not in self._ends:
            self._ends[ends] = self._rule(self._special.one_of(ends))
        return self._ends.get(ends, "")

    @cached_property
    def _anything(self) -> str:
        return self._rule(_ANYTHING)

    def _rule(self, expression: str, mark: str = "") -> str:
        """Add a rule and return its name."""
        name = f"part{len(self.rules)}"
        self.rules.append(f"{name}{mark}: {expression}")
        return name

    def _listed(
        self, form: _Format, field: str, path: str, *, kind: str | None = None
    ) -> Sequence[tuple[_Format, str]]:
        places = [f"{path}.{field}[{number}]" for number in range(len(form[field]))]
        return [(self.checked(one, place, kind=kind), place) for one, place in zip(form[field], places, strict=True)]


def _is_free(form: Any) -> bool:
    """Return whether the format is, or ends with, free text without an end. form: possibly not yet validated."""
    if not isinstance(form, dict):
        return False
    match form.get("type"):
        case "any_text":
            return True
        case "triggered_tags":
            return not (form.get("at_least_one") and form.get("stop_after_first"))
        case "sequence" | "or":
            elements = form.get("elements")
            relevant = (elements[-1:] if form["type"] == "sequence" else elements) if isinstance(elements, list) else []
            return any(map(_is_free, relevant))
    return False
