"""Tool calls in XML-like tags, with arguments as bare text that the tool's schema turns into JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from core.types.json_schema import target
from frontend.parsers.json_value import JsonValue
from frontend.parsers.pythonic import literal_as_json
from frontend.parsers.scanner import MAX_NAME, Reading, Scanner, overlap

_MAX_SPACE = 64  # characters between two tags
_MAX_LOOK = 2 * _MAX_SPACE  # characters that may be space and a tag
BY_JSON = {"integer", "number", "boolean", "object", "array", "null"}
_BY_KEYWORD = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}
_TYPE_OF = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null",
            dict: "object", list: "array"}  # fmt: skip
_MAX_DEPTH = 16  # of references
_MAX_PARTS = 64  # subschemas searched for a parameter


@dataclass(frozen=True, kw_only=True)
class XmlTags:
    """Tags of one model family, in the order in which a call has them."""

    blocks: tuple[str, ...] = ()  # tags with which a block of calls may begin
    call: str  # before the name
    name_end: str = ">"  # if a tag begins here, it is not consumed
    parameter: str  # before a parameter's name
    key_end: str = ">"
    value: str = ""  # between the parameter's name and its value
    value_end: str
    call_end: str
    block_ends: tuple[str, ...] = ()
    padding: str = ""  # at each end of a value


QWEN3_CODER = XmlTags(  # Seed-OSS names its block differently
    blocks=("<tool_call>", "<seed:tool_call>"), call="<function=", parameter="<parameter=", value_end="</parameter>",
    call_end="</function>", block_ends=("</tool_call>", "</seed:tool_call>"), padding="\n",
)  # fmt: skip
GLM = XmlTags(
    call="<tool_call>", name_end="<", parameter="<arg_key>", key_end="</arg_key>", value="<arg_value>",
    value_end="</arg_value>", call_end="</tool_call>",
)  # fmt: skip
MINIMAX_M2 = XmlTags(
    blocks=("<minimax:tool_call>",), call='<invoke name="', parameter='<parameter name="', value_end="</parameter>",
    call_end="</invoke>", block_ends=("</minimax:tool_call>",),
)  # fmt: skip
_DSML = "｜DSML｜"  # noqa: RUF001 - DeepSeek's own bars
DSML = XmlTags(  # V3.2 names a block function_calls, V4 tool_calls
    blocks=(f"<{_DSML}function_calls>", f"<{_DSML}tool_calls>"), call=f'<{_DSML}invoke name="',
    parameter=f'<{_DSML}parameter name="', value_end=f"</{_DSML}parameter>", call_end=f"</{_DSML}invoke>",
    block_ends=(f"</{_DSML}function_calls>", f"</{_DSML}tool_calls>"),
)  # fmt: skip


def xml_calls(scan: Scanner, *, tags: XmlTags) -> Reading[None]:
    """Read calls such as <function=NAME><parameter=KEY>value</parameter>…</function>, alone or in a block."""
    while (yield from scan.next_call(tags.call, *tags.blocks)):
        name = _name((yield from scan.before(tags.name_end, most=MAX_NAME)))
        if name not in scan.tools:
            scan.give_up()
            continue
        yield from scan.optional(">")
        scan.begin(name)
        if (yield from _parameters(scan, tags, _Types(scan.tools[name]))):
            scan.end_call()
            for end in tags.block_ends:
                yield from scan.optional(end)
        else:
            scan.give_up()


def _parameters(scan: Scanner, tags: XmlTags, types: _Types) -> Reading[bool]:
    """Read up to the end of the call. Return whether it was found."""
    opening = "{"
    while (yield from scan.optional(tags.parameter)):
        named = yield from scan.before(tags.key_end, most=MAX_NAME)
        if not (yield from scan.optional(tags.key_end)) or (tags.value and not (yield from scan.optional(tags.value))):
            return False
        key = _name(named)
        head, kinds = f"{opening}{json.dumps(key)}: ", _marked(named) or types.of_parameter(key)
        if kinds <= {"string"}:
            scan.emit_arguments(head + '"')
            if not (yield from _value(scan, tags, types, lambda text: scan.emit_arguments(_quoted(text)[1:-1]))):
                return False
            scan.emit_arguments('"')
        else:
            parts = list[str]()
            is_whole = yield from _value(scan, tags, types, parts.append)
            scan.emit_arguments(head + (as_json if is_whole else begun_as_json)("".join(parts), kinds))
            if not is_whole:
                return False
        opening = ", "
    if not (yield from scan.optional(tags.call_end)) and not (yield from _ends_without_tag(scan, tags, opening)):
        return False
    scan.emit_arguments("{}" if opening == "{" else "}")
    return True


def _ends_without_tag(scan: Scanner, tags: XmlTags, opening: str) -> Reading[bool]:
    """Return whether a call with parameters is over although the model left out its last tag."""
    if opening == "{":
        return False
    for end in tags.block_ends:
        if (yield from scan.next_is(end)):
            return True
    return scan.is_ended and not scan.rest.strip()


def _value(scan: Scanner, tags: XmlTags, types: _Types, take: Callable[[str], None]) -> Reading[bool]:
    """Pass a value on as it arrives, without its padding, and consume its end. Return whether it ended."""
    while tags.padding and not scan.rest and not scan.is_ended:
        yield
    if scan.rest.startswith(tags.padding):
        scan.take(len(tags.padding))
    while True:
        num, end = _value_end(scan.rest, tags, types, is_ended=scan.is_ended)
        if end is not None:
            take(scan.take(num).removesuffix(tags.padding))
            scan.take(end)
            return True
        if tags.padding and scan.rest[:num].endswith(tags.padding) and not (scan.is_ended and num == len(scan.rest)):
            num -= len(tags.padding)
        if num:
            take(scan.take(num))
        if scan.is_ended:
            return False
        yield


def _value_end(text: str, tags: XmlTags, types: _Types, *, is_ended: bool) -> tuple[int, int | None]:
    """Return how many characters of the text are the value's, and the length of the tag behind it; None: it has not
    ended, and the other characters may belong to its end.

    A tag ends the value if the next one follows, so a value may contain it. If the model left the tag out, the next
    parameter or the end of the call ends the value (in formats with padding).
    """
    at = text.find("<")
    while at >= 0:
        length = len(tags.value_end) if text.startswith(tags.value_end, at) else 0
        found = _ends_here(text, at, tags, types, is_ended=is_ended)
        if found:
            return at, length
        if found is None:
            return at, None
        at = text.find("<", at + 1)
    return len(text), None


def _ends_here(text: str, at: int, tags: XmlTags, types: _Types, *, is_ended: bool) -> bool | None:
    """Return whether the tag at this place ends a value; None if that is not known yet."""
    if text.startswith(tags.value_end, at):
        following = text[(begin := at + len(tags.value_end)) : begin + _MAX_LOOK]
        return _is_followed(following, (tags.parameter, tags.call_end, *tags.block_ends), is_ended=is_ended)
    others: tuple[str, ...] = ()
    if tags.padding and text.startswith(tags.padding, at - len(tags.padding)) and at:
        if text.startswith(tags.parameter, at):
            name, closing, _ = text[(begin := at + len(tags.parameter)) : begin + MAX_NAME + 1].partition(tags.key_end)
            return types.has_parameter(name) if closing else None if len(name) <= MAX_NAME else False
        if text.startswith(tags.call_end, at):
            following = text[(begin := at + len(tags.call_end)) : begin + _MAX_LOOK]
            return _is_followed(following, (*tags.block_ends, tags.call), is_ended=is_ended)
        others = (tags.parameter, tags.call_end)
    here = text[at:] if len(text) - at < _MAX_LOOK else ""
    return None if here and any(tag.startswith(here) for tag in (tags.value_end, *others)) else False


def _is_followed(text: str, tags: Sequence[str], *, is_ended: bool) -> bool | None:
    """Return whether one of the tags or the end of the answer comes next; None if that is not known yet."""
    rest = text.lstrip()
    if any(rest.startswith(tag) for tag in tags):
        return True
    if len(text) - len(rest) <= _MAX_SPACE and any(tag.startswith(rest) for tag in tags):
        return True if is_ended else None
    return False


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _name(text: str) -> str:
    """Return a name, without the quote and the attributes behind it."""
    return text.partition('"')[0].strip()


def _marked(text: str) -> set[str]:
    """Return the types that a parameter's own attribute allows; empty if it has none."""
    marked = text.partition('"')[2]
    return {"string"} if 'string="true"' in marked else BY_JSON if 'string="false"' in marked else set()


def streamed_string(scan: Scanner, end: str) -> Reading[None]:
    """Emit a string as it arrives, up to `end`, and its closing quote."""
    while True:
        at = scan.rest.find(end)
        is_whole = at >= 0
        text = scan.take(at) if is_whole else take_begun(scan, end)
        scan.emit_arguments(_quoted(text)[1:-1] + ('"' if is_whole else ""))
        if is_whole or scan.is_ended:
            return
        yield


def take_begun(scan: Scanner, *ends: str) -> str:
    """Consume and return a value's text so far, without characters that may belong to one of its ends."""
    return scan.take(len(scan.rest) - max(overlap(scan.rest, end) for end in ends))


def as_json(value: str, types: set[str]) -> str:
    """Return the value as JSON: a string, unless its schema allows another type and the value parses as one."""
    text = value.strip()
    if types & BY_JSON and ("string" not in types or text == "null"):
        lowered = text.lower()
        for word in (text, "null" if lowered == "none" else lowered):  # accept Python's True, False and None
            try:
                json.loads(word, parse_constant=_reject)
            except (ValueError, RecursionError):
                continue
            return word
    if types & {"object", "array"} and "string" not in types and (found := literal_as_json(text)):
        return found
    return json.dumps(value, ensure_ascii=False)


def begun_as_json(value: str, types: set[str]) -> str:
    """Return the JSON for the beginning of a value."""
    text = value.strip()
    is_json = "string" not in types and JsonValue().feed(text) == len(text)
    return text if is_json else json.dumps(value, ensure_ascii=False)[:-1]


class _Types:
    """JSON types of a call's parameters. The client's schema is not validated."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        self._known: dict[str, set[str]] = {}  # by reference

    def of_parameter(self, name: str) -> set[str]:
        """Return all types that a parameter's schema allows, or an empty set if it allows any."""
        return self._of(self._found(name), 0)

    def has_parameter(self, name: str) -> bool:
        return self._found(name) is not None

    def _found(self, name: str) -> Any:
        """Return the schema of a parameter; None if there is none."""
        parts = [self._document]
        for part in parts:
            properties = part.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                return properties[name]
            more = (self._target(part), *_listed(part.get("allOf")))
            parts += [one for one in more if isinstance(one, Mapping)][: max(0, _MAX_PARTS - len(parts))]
        return None

    def _of(self, schema: Any, depth: int) -> set[str]:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return set()
        named = schema.get("type")
        rules = [{named} if isinstance(named, str) else {one for one in _listed(named) if isinstance(one, str)}]
        rules.append(self._of_reference(schema, depth + 1))
        rules += [self._of(one, depth + 1) for one in _listed(schema.get("allOf"))]
        for choice in ("anyOf", "oneOf"):
            found = [self._of(one, depth + 1) for one in _listed(schema.get(choice))]
            rules.append(set().union(*found) if all(found) else set())
        constants = [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
        rules.append({_TYPE_OF[type(one)] for one in constants if type(one) in _TYPE_OF})
        if not any(rules):
            return {name for key, name in _BY_KEYWORD.items() if key in schema}
        return set.intersection(*({*rule, "integer"} if "number" in rule else rule for rule in rules if rule))

    def _of_reference(self, schema: Mapping[str, Any], depth: int) -> set[str]:
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return set()
        if reference not in self._known:
            self._known[reference] = set()  # until it is known, for cycles
            self._known[reference] = self._of(self._target(schema), depth)
        return self._known[reference]

    def _target(self, schema: Mapping[str, Any]) -> Any:
        reference = schema.get("$ref")
        with suppress(LookupError):
            return target(self._document, reference) if isinstance(reference, str) else None
        return None


def _listed(value: Any) -> list[Any]:
    """Return a list, or an empty one for another type: the client's schema is not validated."""
    return value if isinstance(value, list) else []


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
